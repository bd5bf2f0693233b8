"""A drafter in vLLM's layout, and whether it guesses as well there: `draftsmith export`, from Python."""

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from draftsmith import assets
from draftsmith.drafters.registry import families, family_of
from draftsmith.drafters.trainable import storage
from draftsmith.drafters.vllm import VERSION, Published, VllmTarget
from draftsmith.provenance import provenance
from draftsmith.targets.loading.place import check_place
from draftsmith.types import DraftsmithError, TargetFacts
from draftsmith.workflows.given import require_trained
from draftsmith.workflows.models import Loading, load_target, quiet

if TYPE_CHECKING:
    from torch import Tensor

    from draftsmith.drafters.family import Family
    from draftsmith.drafters.vllm import VllmForm
    from draftsmith.evaluation.peers.acceptance import SideBySide
    from draftsmith.evaluation.prompts import Prompt
    from draftsmith.targets import Target

SETTINGS, RUNS_DRAFTER = "speculative_config.json", "drafter"
MOST_GUESSES = 5
"""Guesses a step if nobody says how many: vLLM drafts chains, of which the later guesses seldom stay."""


@dataclass(frozen=True)
class ExportResult:
    """The folder that was written, and what vLLM is to be told.

    Args:
        target: folder or name of the target.
        settings: vLLM's `speculative_config`.
        compared: how the drafter does in vLLM beside here; None if that was not asked for.
        trust_remote_code: whether vLLM has to run the target's own code.
    """

    provenance: Mapping[str, Any]
    folder: Path
    target: str
    settings: Mapping[str, Any]
    compared: "SideBySide | None" = None
    trust_remote_code: bool = False

    @property
    def passed(self) -> bool:
        """Whether the drafter does as well in vLLM as here, as far as that was looked at."""
        return self.compared is None or self.compared.passed

    @property
    def command(self) -> str:
        """The command line that serves with the drafter."""
        trusts = ("--trust-remote-code",) if self.trust_remote_code else ()
        settings = json.dumps(dict(self.settings))
        return shlex.join(["vllm", "serve", self.target, *trusts, "--speculative-config", settings])

    def as_json(self) -> dict[str, Any]:
        """Return what `draftsmith export --json` writes."""
        compared = {} if self.compared is None else {"compared": self.compared.as_json()}
        return {
            "provenance": dict(self.provenance), "folder": str(self.folder), "target": self.target,
            "speculative_config": dict(self.settings), **compared,
        }


def export(
    drafter: str | Path,
    target: str | Path | None = None,
    *,
    out: str | Path,
    guesses: int | None = None,
    check: Path | str | None = None,
    prompts: "Path | str | Sequence[str | Prompt] | None" = None,
    task: str | None = None,
    prompt_count: int = 24,
    new_tokens: int = 128,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    console: Console | None = None,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> ExportResult:
    """Write a trained drafter as vLLM reads it, and on request decode with it here and there.

    Args:
        drafter: the folder of a trained drafter.
        target: folder or hub name of its target; the embedded one by default.
        out: a new folder, or that of an earlier export, which is replaced.
        guesses: how many tokens vLLM is to guess a step; by default as many as the drafter learnt to, up to 5.
        check: the Python of an environment with vLLM, in which to decode with what was written.
        prompts, task, prompt_count: what is decoded behind in that check; the embedded held-out texts by default.
        new_tokens: greedy tokens behind every prompt.
        dtype, device: of that check.
        trust_remote_code: run code that comes with the target.
        console: where loading is reported; nowhere by default.
        on_progress: receives what is being done, and how much of how much of it is done.

    Raises:
        DraftsmithError: a drafter that vLLM cannot run, or of another target, or a folder that is there already.
    """
    source, folder = Path(drafter).expanduser(), Path(out).expanduser()
    require_trained(source, "export")
    if (folder / SETTINGS).is_file():  # an earlier export is replaced
        storage.refuse_foreign(folder)
    else:
        storage.refuse_full(folder)
    python = None if check is None else program(Path(check).expanduser())
    if check is not None and (prompt_count < 3 or new_tokens < 8):
        raise DraftsmithError(f"{prompt_count} prompts of {new_tokens} tokens are too few; use at least 3 of 8 tokens.")
    family = _known_to_vllm(source)
    name = str(target) if target is not None else str(assets.demo_target())
    check_place(name)
    if Path(name).is_dir():
        name = str(Path(name).resolve())
    shown = console or quiet()

    storage.verify_folder(source)
    form, loading = family.vllm, Loading(dtype, device, trust_remote_code)
    assert form is not None
    load = cache(partial(load_target, name, loading, shown))
    facts, config = _facts(name, load, trust_remote_code), storage.read_config(source)
    config.pop(storage.TENSOR_NAMES, None)
    found = Published(config, storage.read_tensors(source, form.weights_file))
    _check_made_for(source, found, form, facts)
    learnt = form.learnt(found)
    if guesses is not None and (guesses < 1 or (form.is_bounded and guesses > learnt)):
        most = f"up to {learnt} tokens" if form.is_bounded else "at least one token"
        raise DraftsmithError(f"the drafter guesses {most} a step, not {guesses}; give another number.")
    settings = {
        "method": form.method, "model": str(folder.resolve()),
        "num_speculative_tokens": guesses or min(learnt, MOST_GUESSES),
    }
    # The drafter of every run has the same name, so that of the run is told too.
    told = source.name if source.name != RUNS_DRAFTER else f"{source.absolute().parent.name}/{source.name}"
    where = provenance(target=facts.name, drafter=told, written_for=f"vLLM {VERSION}")
    written = ExportResult(where, folder, name, settings, trust_remote_code=trust_remote_code)
    _write(written, form.adapt(found, facts), form.weights_file)
    if python is None:
        return written

    from draftsmith.evaluation.peers.acceptance import side_by_side
    from draftsmith.workflows.checking import ragged
    from draftsmith.workflows.sources import gather_prompts

    loaded = load()
    texts = ragged(loaded, gather_prompts(prompts, task), prompt_count, new_tokens, shown)
    compared = side_by_side(
        loaded, source, name, settings, python, texts, new_tokens, trust_remote_code, on_progress
    )
    return replace(written, compared=compared)


def program(path: Path) -> Path:
    """Return the path of a Python; DraftsmithError where there is none that can be run."""
    if path.is_file() and os.access(path, os.X_OK):
        return path
    near = path / "bin" / "python"
    meant = f"did you mean {near}?" if near.is_file() else "name the Python of an environment with vLLM."
    raise DraftsmithError(f"{path} {'cannot be run' if path.exists() else 'does not exist'}; {meant}")


def _known_to_vllm(folder: Path) -> "Family":
    """Return the family of a drafter; DraftsmithError where vLLM has nothing like it."""
    family = family_of(folder)
    if family is None:
        raise DraftsmithError(f"{folder} holds no drafter that is known here; give the folder of one.")
    if family.vllm is None:
        known = ", ".join(sorted(one.name for one in families().values() if one.vllm is not None))
        raise DraftsmithError(
            f"{folder} is of the family {family.name!r}, of which vLLM {VERSION} runs none; train one of {known}, or "
            "serve it with draftsmith serve."
        )
    return family


def _facts(name: str, load: "Callable[[], Target]", trust_remote_code: bool) -> VllmTarget:
    """Return what is to be known of the target, from its config; it is loaded only for its projection."""
    from transformers import AutoConfig

    from draftsmith.targets.loading.faults import config_fault
    from draftsmith.targets.loading.support import fingerprint, longest_text

    try:
        whole = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        config = whole.get_text_config()
    except Exception as error:  # each model's config checks itself and raises its own kinds of exceptions
        raise config_fault(error, name) from error

    def head() -> "Tensor":
        return load().head_weight_VF.detach()

    return VllmTarget(
        Path(name).name, config.hidden_size, config.vocab_size, longest_text(config, name), fingerprint(whole), head
    )


def _check_made_for(folder: Path, drafter: Published, form: "VllmForm", target: VllmTarget) -> None:
    """Refuse another target than the recorded one, or for files of others one of another width or vocabulary."""
    from draftsmith.drafters.trainable.model import check_target

    made_for = drafter.config.get("draftsmith", {}).get("target")
    if made_for is None:
        made_for = {"vocab_size": drafter.config.get("vocab_size")}
        if form.reads is not None and (read := drafter.tensors.get(form.reads[0])) is not None:
            made_for["hidden_size"] = read.shape[-1] // form.reads[1]
    facts = TargetFacts(target.hidden_size, target.vocab_size, None, target.name, fingerprint=target.fingerprint)
    check_target(folder, made_for, facts)


def _write(result: ExportResult, drafter: Published, weights_file: str) -> None:
    def fill(aside: Path) -> None:
        storage.write_json(aside / "config.json", dict(drafter.config))
        storage.write_tensors(aside / weights_file, drafter.tensors)
        storage.write_json(aside / SETTINGS, dict(result.settings))
        storage.write_bytes(aside / "README.md", _readme(result).encode())

    storage.write_folder(result.folder, fill)


def _readme(result: ExportResult) -> str:
    made = result.provenance
    return (
        f"# A drafter for {made['target']}, in the layout of vLLM {VERSION}\n\n"
        f"Written by Draftsmith from the drafter in `{made['drafter']}`. To serve with it:\n\n"
        f"    {result.command}\n\n"
        f"`{SETTINGS}` has the same settings. They name this folder where it was written; if it\n"
        "moves, change `model`.\n"
    )
