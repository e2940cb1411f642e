"""The command line: `generate`, `score`, `plan` for what fits, `quality` for what it costs.

`app.py` has the commands. `generate.py` is `pagedkv generate` and `score.py` `pagedkv score`;
`option.py` makes commands of options, `job_options.py` has those of both, `options.py` says what
they mean, and `start.py` begins either, makes a job of them (`job_spec.py`), and ends it.
`scoring.py` is what is scored. `rows.py`, `template.py` and `prompts.py` read what goes in,
`output.py` and `table.py` keep what comes out, `model_digest.py` tells which model it is from.
`resume.py` finds what is left to do, `job.py` runs it by `generate_run.py` or `score_run.py`,
`torchrun.py` joins several processes. `screen.py` shows what `pace.py` and `show.py` know of a
running job, `texts.py` prints answers, `signals.py` hears SIGTERM, `report.py` says how it went.
`plan.py`, `trace.py` and `eval.py` are commands, and `quality.py` with `quality_run.py`;
`loading.py` opens models.
"""

import errno
import os
import sys
from io import TextIOWrapper


def main() -> None:
    """The `pagedkv` command."""
    for number in range(3):  # else the next file to be opened would be a standard one
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if isinstance(sys.stdout, TextIOWrapper):  # where no character may end a job
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
