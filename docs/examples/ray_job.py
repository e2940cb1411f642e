"""The prompts of Parquet files are answered by the actors of a Ray cluster, each row once.

    pip install 'pagedkv[hf,ray]'
    python ray_job.py prompts.parquet answers --model FOLDER_OR_HUB_ID

Rows keep their columns and get `answer`, `finish_reason`, `cached_tokens` and `error`; they lie in
answers/rows. The same command goes on where it was ended. What to know: docs/howto/ray.md.
"""

import argparse
import os
import sys

try:
    import pyarrow
    import ray.data
    from pyarrow import compute, dataset
    from ray.data.checkpoint import CheckpointConfig
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: pip install 'pagedkv[hf,ray]'")

ADDED = {"answer": "string", "finish_reason": "string", "cached_tokens": "int64", "error": "string"}
TEXTS = ("string", "large_string")


class Answers:
    """An actor: one model and its pages, for as long as it lives."""

    def __init__(self, name, column, raw, max_tokens, options):
        import torch
        import transformers

        from pagedkv import BatchGenerator

        transformers.logging.disable_progress_bar()
        device, dtype = ("cuda", "auto") if torch.cuda.is_available() else ("cpu", torch.float32)
        model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        self.generator = BatchGenerator(model.eval().to(device), tokenizer, max_tokens=max_tokens)
        self.is_chat = bool(tokenizer.chat_template) and not raw
        self.column, self.options = column, options

    def __call__(self, batch):
        prompts = [text or "" for text in batch[self.column].to_pylist()]
        if self.is_chat:  # but nothing stays nothing, which is an error of its row
            prompts = [text and [{"role": "user", "content": text}] for text in prompts]
        results = self.generator.generate(prompts, **self.options)
        for name, kind in ADDED.items():
            values = [getattr(r, "text" if name == "answer" else name) for r in results]
            batch = batch.append_column(name, pyarrow.array(values, kind))
        return batch


def look_at(source, column, key):
    """How many rows there are; what is wrong with them is said before a model is loaded."""
    try:
        data = dataset.dataset(source)
        names = data.schema.names
        if absent := {column, key} - {*names}:
            sys.exit(f"{source}: there is no column {absent.pop()}, but {', '.join(names)}")
        ids = data.to_table(columns=[key])[key]
    except FileNotFoundError:
        sys.exit(f"{source}: there is no such file or folder")
    except (OSError, pyarrow.ArrowInvalid) as error:
        sys.exit(f"{source}: expected Parquet: {error}")
    if not ids:
        sys.exit(f"{source}: there are no rows")
    if (kind := str(data.schema.field(column).type)) not in TEXTS:
        sys.exit(f"--column: expected one of texts, got {column} of {kind}")
    if taken := ADDED.keys() & {*names}:
        sys.exit(f"{source}: expected no column {taken.pop()}, which is the answers' own")
    if not (kind := str(ids.type)).startswith(("int", "uint", *TEXTS)):
        sys.exit(f"--id: expected one of whole numbers or texts, got {key} of {kind}")
    if ids.null_count or len(compute.unique(ids)) < len(ids):
        sys.exit(f"--id: expected another value in each row, got {key}")
    return len(ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", help="a Parquet file or a folder of them")
    parser.add_argument("out", help="a folder; where it is there already, the job goes on")
    parser.add_argument("--model", required=True, help="a folder or a hub id")
    parser.add_argument("--column", default="prompt", help="which one has the prompts")
    parser.add_argument("--id", default="id", help="the column that names each row")
    parser.add_argument("--raw", action="store_true", help="prompts as they are, without a chat")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, help="of an actor's pages; default by memory")
    parser.add_argument("--actors", type=int, help="default one a card, or one")
    parser.add_argument("--batch", type=int, default=256, help="rows an actor takes at once")
    args = parser.parse_args()
    for name in ("max_new_tokens", "max_tokens", "actors", "batch"):
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')}: expected 1 or more, got {value}")
    source, out = (p if "://" in p else os.path.abspath(p) for p in (args.prompts, args.out))
    count = look_at(source, args.column, args.id)
    ray.init()  # here, or where RAY_ADDRESS says
    cpus, gpus = (int(ray.cluster_resources().get(kind, 0)) for kind in ("CPU", "GPU"))
    if cpus < 2:  # the readers of rows and of what is done would wait for each other
        sys.exit(f"ray: expected a cluster with 2 CPUs or more, got {cpus}")
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
    context = ray.data.DataContext.get_current()
    context.checkpoint_config = CheckpointConfig(
        args.id, f"{out}/done", delete_checkpoint_on_success=False
    )
    # The parts that are sorted, each a task: not 200 of them for a few rows.
    context.default_hash_shuffle_parallelism = min(200, -(-count // args.batch))
    # Rows with a common beginning lie in one batch then, and their actor computes it once.
    rows = ray.data.read_parquet(source).sort(args.column)
    # A step between the two: else each sorted part is cut for itself, into odd pieces.
    rows = rows.map_batches(lambda part: part, batch_size=None, batch_format="pyarrow")
    rows = rows.repartition(target_num_rows_per_block=args.batch, strict=True)
    rows.map_batches(
        Answers,
        fn_constructor_args=(args.model, args.column, args.raw, args.max_tokens, options),
        batch_size=args.batch,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=args.actors or gpus or 1),
        num_gpus=1 if gpus else 0,
        num_cpus=0,  # where actors claim every CPU, reading waits for one for ever
    ).write_parquet(f"{out}/rows")


if __name__ == "__main__":
    main()
