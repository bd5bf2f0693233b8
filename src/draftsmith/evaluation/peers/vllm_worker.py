"""Decodes greedily with vLLM; `vllm_process.py` starts this file under the Python of an environment that has vLLM.

    python vllm_worker.py SETTINGS

SETTINGS is a JSON object, the arguments of vLLM's `LLM`. Requests come line by line on standard input, {"prompts":
[[ids]], "new_tokens": n}; the seconds, the tokens and the counters of drafts since the start go back on standard
output, which nothing else may write to. Nothing of draftsmith can be imported here.
"""

import json
import os
import sys
import time

DRAFTS, BY_POSITION = "vllm:spec_decode_num_", "accepted_tokens_per_pos"


def main() -> None:
    """Load the model, say that it is ready, and answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM reports on standard output
    from vllm import LLM, SamplingParams, __version__  # type: ignore[import-not-found]

    model = LLM(**json.loads(sys.argv[1]))
    print(json.dumps({"version": __version__}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        count = request["new_tokens"]
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
        begun = time.perf_counter()
        outputs = model.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begun
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        assert all(len(row) == count for row in tokens)
        print(json.dumps({"seconds": seconds, "tokens": tokens, "counters": counters(model)}), file=answers)


def counters(model: object) -> dict[str, object]:
    """Return the counters of drafts by their names behind `DRAFTS`; none where vLLM keeps no statistics."""
    try:
        metrics = model.get_metrics()  # type: ignore[attr-defined]
    except AssertionError:
        return {}
    told = {metric.name.removeprefix(DRAFTS): metric for metric in metrics if metric.name.startswith(DRAFTS)}
    return {name: metric.values if name == BY_POSITION else metric.value for name, metric in told.items()}


if __name__ == "__main__":
    main()
