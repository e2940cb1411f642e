"""The command line: `generate`, `score`, `plan` for what fits, `quality` for what it costs.

`app.py` has the commands. `generate.py` is `pagedkv generate`, `score.py` is `pagedkv score`.
`option.py` makes commands of options, `job_options.py` lists the options that both share,
`options.py` checks their values, and `start.py` begins either command, makes a job (`job_spec.py`)
and ends it. `scoring.py` says what `score` scores. `rows.py`, `template.py` and `prompts.py` read
prompts, `output.py` and `table.py` write answers, `job_rows.py` tells a job's rows from others,
`model_digest.py` tells which model gave them.
`resume.py` finds the rows that are left to do, `job.py` runs them by `generate_run.py` or
`score_run.py`, `torchrun.py` joins several processes. `screen.py` shows the progress that `pace.py`
measures and the pages that `show.py` draws, `texts.py` prints answers, `signals.py` turns SIGTERM
into Ctrl-C, `report.py` makes the summary at the end. `plan.py`, `trace.py`, `eval.py` and
`quality.py` (with `quality_run.py`) are the other commands; `loading.py` opens models.
"""

import errno
import os
import sys
from io import TextIOWrapper


def main() -> None:
    """The `pagedkv` command."""
    for number in range(3):  # else a file opened later would take the number of a closed stream
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if isinstance(sys.stdout, TextIOWrapper):  # no character may end a job
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        from .torchrun import be_silent, follows

        if follows():
            be_silent()
        from .app import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # takes what Python still has to write
        sys.exit(f"pagedkv: standard output: {error.strerror}")
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in ("typer", "rich", "filelock", "transformers"):
            raise
        sys.exit(f"pagedkv: the command needs {package}: pip install 'pagedkv[hf,cli]'")
