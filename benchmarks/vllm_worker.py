"""Decodes with vLLM on a CPU and tells how long each call took; `vllm_peer.py` starts it under vLLM's own Python.

    python vllm_worker.py FOLDER LONGEST ROWS

Requests come line by line on standard input, {"prompts": [[ids]], "new_tokens": n}, and {"seconds": s} goes back on
standard output, which nothing else may write to.
"""

import json
import os
import sys
import time


def main() -> None:
    """Load the model, say that it is ready, and answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM reports on standard output
    from vllm import LLM, SamplingParams, __version__

    folder, longest, rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    model = LLM(
        model=folder, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=longest, max_num_seqs=rows,
        max_num_batched_tokens=max(longest, 2048), enable_prefix_caching=False, disable_log_stats=True,
    )
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
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers)


if __name__ == "__main__":
    main()
