"""Finds the models and texts that ship with the package."""

from pathlib import Path

from draftsmith.types import DraftsmithError

DATA = Path(__file__).parent / "assets_data"
TARGET_NAME = "demo-target"
DRAFTER_NAME = "demo-mlp"
FIRST_STAGE_NAME = "demo-mlp-stage1"


def demo_target() -> Path:
    """Return the folder of the embedded target; DraftsmithError if this installation has none."""
    return _model(TARGET_NAME, "--target")


def demo_drafter() -> Path:
    """Return the folder of the fully trained MLP speculator for it."""
    return _model(DRAFTER_NAME, "--drafter")


def demo_first_stage() -> Path:
    """Return the folder of the MLP speculator after its first training stage, from which `demo` goes on."""
    return _model(FIRST_STAGE_NAME, "--drafter")


def prompt_file(split: str = "prompts") -> Path:
    """Return the JSONL of the embedded texts: "prompts" (held out, to measure on) or "train"."""
    path = DATA / "prompts" / f"{split}.jsonl"
    if not path.is_file():
        raise DraftsmithError(f"the embedded prompt set {split!r} is not in this install; give prompts with --data.")
    return path


def _model(name: str, option: str) -> Path:
    folder = DATA / name
    if not (folder / "config.json").is_file():
        raise DraftsmithError(
            f"the embedded model {name!r} is not part of this install; reinstall the full package, "
            f"or name a model with {option}."
        )
    return folder
