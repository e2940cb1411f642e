"""The command line: `pagedkv generate` for batch jobs, `pagedkv info` for what is installed.

`app.py` has the commands and their options, `job.py` runs one, `prompts.py` reads what goes in,
`output.py` keeps what comes out, `report.py` says how it went.
"""

import sys


def main() -> None:
    """The `pagedkv` command."""
    try:
        from .app import app

        app()
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "filelock", "transformers"):
            raise
        sys.exit(f"pagedkv: the command needs {error.name}: pip install 'pagedkv[hf,cli]'")
