"""The `draftsmith` application: its commands, and what happens to a mistake or to Ctrl-C."""

import errno
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from draftsmith import __version__
from draftsmith.cli.bench import bench
from draftsmith.cli.check import check
from draftsmith.cli.common import say
from draftsmith.cli.compare import compare
from draftsmith.cli.demo import demo
from draftsmith.cli.doctor import doctor
from draftsmith.cli.export import export
from draftsmith.cli.families import families
from draftsmith.cli.generate import generate
from draftsmith.cli.load import load
from draftsmith.cli.prove import prove
from draftsmith.cli.serve import serve
from draftsmith.cli.train import train
from draftsmith.cli.tune_layers import tune_layers
from draftsmith.types import DraftsmithError

USER_MISTAKE = 2
INTERRUPTED = 130


UNUSABLE = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP,
)
"""Errors of the system that the user can do something about."""


class FriendlyGroup(typer.core.TyperGroup):
    """Turns a user's mistake, a full disk or Ctrl-C into one sentence and an exit code, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except DraftsmithError as error:
            say(str(error) if error.exit_code == INTERRUPTED else f"Error: {error}")
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            say("Interrupted; nothing that was already saved is lost.")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # Whoever read our output has seen enough; nothing is left to be said there.
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
            raise typer.Exit(0) from None
        except OSError as error:
            if error.errno not in UNUSABLE:
                raise
            what = error.filename or "a file"
            say(f"Error: {what} could not be used ({error.strerror}); fix its path or permissions, or free some space.")
            raise typer.Exit(USER_MISTAKE) from None


app = typer.Typer(
    name="draftsmith",
    cls=FriendlyGroup,
    help="Train, prove and run the small draft models that make a language model generate faster, word for word "
    "the same text.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
LISTED = "`draftsmith families` lists the families."
MORE: dict[Callable[..., None], str] = {
    demo: "README.md",
    train: f"docs/training.md. {LISTED}",
    tune_layers: "docs/families/draft-model.md",
    generate: f"docs/verification.md, of the drafts. {LISTED}",
    serve: f"docs/serving.md. {LISTED}",
    bench: f"benchmarks/README.md. {LISTED}",
    compare: f"docs/compare.md. {LISTED}",
    check: "docs/prove.md",
    prove: "docs/prove.md",
    export: "docs/export.md",
    load: "docs/load.md",
    families: "docs/which-family.md",
    doctor: "docs/native.md",
}
"""Every command with where more is said of it."""

for command, more in MORE.items():
    app.command(epilog=f"More: {more}")(command)


def say_version(wanted: bool) -> None:
    """Print the version and end."""
    if wanted:
        typer.echo(f"draftsmith {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=say_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Hold the options in front of the command; what the command line is for is said where `app` is made."""


def main() -> None:
    """Run the command line; console-script entry point."""
    app(prog_name="draftsmith")
    sys.exit(0)
