"""`draftsmith generate`: a prompt in, the target's text out as it comes."""

import io
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from draftsmith.cli.common import (
    OUTPUT,
    CompileOption,
    DeviceOption,
    DrafterOption,
    DtypeOption,
    JsonOption,
    NativeOption,
    QuantizeOption,
    TargetOption,
    ThreadsOption,
    TrustOption,
    check_outputs,
    importing,
    load_engine,
    say,
    set_up,
    settle_compilation,
)
from draftsmith.cli.guidance import (
    GrammarOption,
    PredictionOption,
    RegexOption,
    SchemaOption,
    read_constraint,
    read_text,
)
from draftsmith.cli.plans import (
    DRAFTS,
    AcceptanceOption,
    BeamOption,
    ConfidenceOption,
    DeltaOption,
    EpsilonOption,
    NodesOption,
    RemeasureOption,
    SampledOption,
    ShapeOption,
    check_draft_rows,
    check_drafter,
    named,
    read_drafts,
    read_rules,
    refuse_without_drafter,
)
from draftsmith.plan import NO_DRAFT
from draftsmith.processor import Watch
from draftsmith.text_files import ENCODING
from draftsmith.types import LOSSY, Completion, DraftsmithError, SamplingParams

if TYPE_CHECKING:
    from draftsmith.engine import Engine, Prompt
    from draftsmith.plan import Plan
    from draftsmith.targets import Target

SAMPLING, CHAT = "Sampling", "Chat"


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The text to continue; without it, standard input.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the text to continue from a file.")] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="The text is a user's message: use the chat template.", rich_help_panel=CHAT),
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="With --chat: what the system message says.", rich_help_panel=CHAT)
    ] = None,
    target: TargetOption = None,
    drafter: DrafterOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    trust_remote_code: TrustOption = False,
    max_tokens: Annotated[int, typer.Option(help="Generate this many tokens, unless a stop comes first.")] = 128,
    n: Annotated[int, typer.Option("--n", "-n", help="Independent continuations.")] = 1,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy, 1 samples as the model says.", rich_help_panel=SAMPLING)
    ] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0: all.", rich_help_panel=SAMPLING)] = 0,
    top_p: Annotated[float, typer.Option(help="Keep this much probability.", rich_help_panel=SAMPLING)] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Drop tokens below this share of the likeliest.", rich_help_panel=SAMPLING)
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1 discourages tokens already seen.", rich_help_panel=SAMPLING)
    ] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option(help="Subtracted once from tokens in the output.", rich_help_panel=SAMPLING)
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="Subtracted for every occurrence.", rich_help_panel=SAMPLING)
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None, typer.Option(help="TOKEN_ID=VALUE; may be repeated.", rich_help_panel=SAMPLING)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.", rich_help_panel=SAMPLING)] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    stop_token_id: Annotated[list[int] | None, typer.Option(help="End at this token id; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end token.")] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="Put log-probabilities of so many alternatives into --json.")
    ] = None,
    json_schema: SchemaOption = None,
    regex: RegexOption = None,
    grammar: GrammarOption = None,
    plan: ShapeOption = None,
    candidates: Annotated[
        int | None, typer.Option(help="Verify only the best K paths of the tree.", rich_help_panel=DRAFTS)
    ] = None,
    sampled: SampledOption = False,
    beam: BeamOption = None,
    nodes: NodesOption = None,
    confidence: ConfidenceOption = None,
    acceptance: AcceptanceOption = "exact",
    epsilon: EpsilonOption = None,
    delta: DeltaOption = None,
    prediction: PredictionOption = None,
    remeasure: RemeasureOption = False,
    no_draft: Annotated[bool, typer.Option("--no-draft", help="Plain decoding.", rich_help_panel=DRAFTS)] = False,
    draft_rows: Annotated[
        int | None,
        typer.Option(
            help="With --plan and --n: draft only while at most so many continuations run.", rich_help_panel=DRAFTS
        ),
    ] = None,
    compile: CompileOption = "auto",
    native: NativeOption = True,
    threads: ThreadsOption = None,
    quantize: QuantizeOption = "none",
    stats: Annotated[
        bool, typer.Option("--stats", help="Show what drafting cost and brought.", rich_help_panel=OUTPUT)
    ] = False,
    json_path: JsonOption = None,
) -> None:
    """Continue a text; what is written is the target's own, only sooner (unless --acceptance typical is asked for).

    A continuation for which the target has no finite logits ends there; the others are written whole, and the exit
    code is 2.

    Example: `draftsmith generate "def fibonacci(n):" --max-tokens 100 --stats`, or, of a model trained to chat,
    `draftsmith generate "What is a speculator?" --chat --target TARGET`
    """
    check_outputs(json_path)
    if system is not None and not chat:
        raise DraftsmithError(f"--system is {system!r}, but only a chat has a system message; add --chat.")
    if prediction is not None and no_draft:
        raise DraftsmithError("--prediction is drafted, and --no-draft decodes plainly; leave one of them out.")
    drafting = {
        "--plan": plan, "--drafter": drafter, "--candidates": candidates, "--sampled": sampled or None,
        "--beam": beam, "--nodes": nodes, "--confidence": confidence, "--epsilon": epsilon, "--delta": delta,
        "--acceptance": None if acceptance == "exact" else acceptance, "--draft-rows": draft_rows,
        "--remeasure": remeasure or None,
    }
    asked_for = named(drafting)
    if no_draft and asked_for:
        raise DraftsmithError(f"--no-draft drafts nothing; leave out {asked_for}, or --no-draft.")
    refuse_without_drafter(asked_for, target, drafter is not None)
    check_draft_rows(draft_rows, plan)
    if remeasure and plan is not None:
        raise DraftsmithError("--remeasure finds out which drafts pay, and --plan says it; leave one of them out.")
    text = read_prompt(prompt, prompt_file)
    asked = as_messages(text, system) if chat else text
    rules = read_rules(acceptance, epsilon, delta, sampled, beam, nodes, temperature, confidence)
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=read_bias(logit_bias or []),
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        stop_token_ids=tuple(stop_token_id or ()),
        ignore_eos=ignore_eos,
        seed=seed,
        n=n,
        logprobs=logprobs,
        constraint=read_constraint(json_schema, regex, grammar),
        prediction=None if prediction is None else read_text(prediction, "--prediction"),
    )
    from draftsmith import assets
    from draftsmith.drafters.registry import embedded
    from draftsmith.workflows.given import check_models

    if drafter is None and target is None and not no_draft:
        # A lookup leaves nothing to compile.
        drafter = embedded() if compile in ("auto", "off") else str(assets.demo_drafter())
    check_models(target, () if no_draft else (drafter,), (dtype,), device=device)
    drafts = read_drafts(plan, candidates, rules)
    notes = Console(stderr=True)
    with importing():
        import draftsmith.engine  # noqa: F401
    set_up(threads, notes)
    engine = load_engine(
        notes,
        target=target,
        drafter=drafter,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        native=native,
        quantize=quantize,
        max_batch=max(1, min(n, 8)),
        draft=not no_draft,
    )
    if chat:
        check_chat(engine.target)
    if not no_draft:
        check_drafter(engine.drafter, rules)
    shape = NO_DRAFT if no_draft else drafts.plan(engine.plan)
    engine.admit_call([asked], params)  # so that what does not fit is refused before anything is compiled or measured
    if draft_rows is not None:
        from draftsmith.engine import OffAbove

        bounded = engine.plan if shape is None else shape
        engine, shape = engine.under(OffAbove(bounded, draft_rows)), None
        engine.plan = bounded
    engine = settle_compilation(
        notes, engine, compile, n * max_tokens, lambda compiled: compiled.prepare(min(n, 8), shape)
    )
    if shape is None and plan is None:
        from draftsmith.workflows.fitting import fit_drafts

        engine = fit_drafts(engine, drafter, notes, says_kept=stats, anew=remeasure)
    from draftsmith.native import seconds_short

    short_before, watch = seconds_short(), Watch()
    completions = write_out(engine, asked, params, shape)
    if n > 1 and temperature == 0:
        notes.print(f"[dim]At temperature 0 all {n} texts are the same; --temperature 0.8 makes them differ.[/dim]")
    if not all(completion.statistics.lossless for completion in completions):
        notes.print(f"[dim]This text is {LOSSY}: it is not distributed as the target's own.[/dim]")
    if stats:
        from draftsmith.cli.statistics import drafts_in_words, plain_pace, show_statistics

        short_s, drafted = seconds_short() - short_before, drafts_in_words(engine, shape)
        rows = min(n, engine.max_batch)
        plain = rows / plain_pace(engine, rows)
        show_statistics(notes, completions, drafted, plain, short_s, watch.others(), quantize)
    if json_path is not None:
        from draftsmith.evaluation.reporting.result_files import write_json
        from draftsmith.provenance import provenance

        used = shape if shape is not None else engine.plan
        where = provenance(
            target=engine.target.name,
            dtype=str(engine.target.dtype).removeprefix("torch."),
            compiled=engine.compiled,
            plan=asdict(used),
        )
        write_json(json_path, {"provenance": where, "prompt": asked, "completions": [as_json(c) for c in completions]})
    failed = [(number, completion.error) for number, completion in enumerate(completions, 1) if completion.error]
    for number, sentence in failed:
        say(f"Error: continuation {number}: {sentence}" if n > 1 else f"Error: {sentence}")
    if failed:
        raise typer.Exit(DraftsmithError.exit_code)


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """Take the text from the argument, the file or standard input; DraftsmithError if it is empty or given twice."""
    if prompt is not None and prompt_file is not None:
        raise DraftsmithError("there is a prompt and a --prompt-file; give one of them.")
    if prompt is not None:
        text = prompt
    elif prompt_file is not None:
        try:
            text = prompt_file.read_text(ENCODING)
        except IsADirectoryError as error:
            raise DraftsmithError(f"the prompt file {prompt_file} is a folder; give a file in it.") from error
        except OSError as error:
            why = error.strerror or error
            raise DraftsmithError(f"the prompt file {prompt_file} cannot be read ({why}); check the path.") from error
        except UnicodeDecodeError as error:
            raise _not_utf8(f"the prompt file {prompt_file}", error) from error
    else:
        text = read_standard_input()
    if not text:
        raise DraftsmithError("the prompt is empty; give some text as argument, in a file or on standard input.")
    return text


def read_standard_input() -> str:
    """Read all of it as UTF-8, whatever the locale says; DraftsmithError if it is not."""
    if sys.stdin is None:  # as a shell's `<&-` leaves it
        raise DraftsmithError("standard input is closed; give the prompt as an argument or as --prompt-file.")
    given = sys.stdin.buffer.read()
    try:
        text = given.decode(ENCODING)
    except UnicodeDecodeError as error:
        raise _not_utf8("standard input", error) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _not_utf8(what: str, error: UnicodeDecodeError) -> DraftsmithError:
    return DraftsmithError(
        f"{what} is not UTF-8 (byte {error.start + 1} is 0x{error.object[error.start]:02x}); convert it, "
        "with iconv for example."
    )


def as_messages(text: str, system: str | None) -> list[dict[str, str]]:
    """Return a conversation that waits for its first answer."""
    first = [{"role": "system", "content": system}] if system is not None else []
    return [*first, {"role": "user", "content": text}]


def check_chat(target: "Target") -> None:
    """Raise a DraftsmithError where the target has a tokenizer without a chat template."""
    if target.tokenizer is not None and target.tokenizer.chat_template is None:
        raise DraftsmithError(
            f"--chat needs a chat template, and {target.name!r} has none; leave out --chat, or give a --target that "
            "was trained to chat."
        )


def read_bias(pairs: list[str]) -> dict[int, float]:
    """Read ["17=-2.5", …]."""
    bias = {}
    for pair in pairs:
        token, _, value = pair.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError as error:
            raise DraftsmithError(f"--logit-bias is {pair!r}; write TOKEN_ID=VALUE, such as 17=-2.5.") from error
    return bias


def write_out(engine: "Engine", prompt: "Prompt", params: SamplingParams, plan: "Plan | None") -> list[Completion]:
    """Write one continuation as it comes, or several one after the other; return them all."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A locale may know fewer characters than the target: "\\u4f60" is better than an end in the middle.
        sys.stdout.reconfigure(errors="backslashreplace")
    if params.n > 1:
        completions = engine.generate([prompt], params, plan=plan)
        for number, completion in enumerate(completions, 1):
            typer.echo(f"--- {number} ---\n{completion.text}")
        return completions
    finished: list[Completion] = []
    for chunk in engine.stream([prompt], params, plan=plan):
        sys.stdout.write(chunk.text)
        sys.stdout.flush()
        if chunk.completion is not None:
            finished.append(chunk.completion)
    sys.stdout.write("\n")
    return finished


def as_json(completion: Completion) -> dict[str, Any]:
    """Return a completion with its statistics."""
    record = asdict(completion)
    record["statistics"]["tokens_per_step"] = completion.statistics.tokens_per_step
    return record
