"""What `draftsmith check` said of several drafters, in one file and one table.

    for family in mlp medusa hydra eagle eagle3 recurrent firp small-lm; do
        draftsmith check --drafter comparison/runs/$family/drafter --json checks/$family.json
    done
    python benchmarks/checks.py checks/*.json

Takes the JSON of one `check` a family, named by the family, and writes benchmarks/results/check.json.
"""

import argparse
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "check.json"


def largest_gap(parity: dict[str, Any]) -> float:
    """Return by how much predicted and measured acceptance differ where they differ most, over the depths."""
    both = zip(parity["predicted_by_depth"], parity["measured_by_depth"], strict=True)
    return max((abs(predicted - measured) for predicted, measured in both), default=0.0)


def line(family: str, record: dict[str, Any]) -> str:
    """Return a family's line of the table."""
    parity, where = record["parity"], record["provenance"]
    what = "passed" if record["passed"] else record["sentence"].partition(";")[0]
    gap = "-" if parity is None else f"{100 * largest_gap(parity):.2f} points"
    steps = "-" if parity is None else f"{parity['steps']:,} ({parity['ties']} up to a tie)"
    return f"| {family} | {where['prompts']} × {where['new_tokens']} | {steps} | {what} | {gap} |"


def main() -> None:
    """Merge and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="JSON of `draftsmith check`, FAMILY.json each")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where to write all of them")
    args = parser.parse_args()
    records = {path.stem: json.loads(path.read_text()) for path in sorted(args.files)}
    args.json.write_text(json.dumps(records, indent=2) + "\n")
    print("| family | prompts × tokens | steps compared | verdict | largest gap |\n|---|---|---|---|---|")
    for family, record in records.items():
        print(line(family, record))


if __name__ == "__main__":
    main()
