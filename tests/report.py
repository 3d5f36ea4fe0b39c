# SPDX-License-Identifier: Apache-2.0
"""What the tests of the ops covered: op × test × implementation, from a run's JUnit file.

python -m pytest tests/pallas_kernels --junitxml=junit.xml
python -m tests.report junit.xml
"""

import collections
import re
import sys
import xml.etree.ElementTree as ElementTree

IMPLEMENTATIONS = ("reference", "xla", "triton", "mosaic")


def outcome(case: ElementTree.Element) -> str:
    """passed, skipped, or failed (errors included)."""
    kinds = {child.tag for child in case}
    if kinds & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in kinds else "passed"


def rows(path: str) -> dict[tuple[str, str], dict[str, collections.Counter]]:
    """Outcomes by (test file, test) and by implementation; "all" where a test names none."""
    table = collections.defaultdict(lambda: collections.defaultdict(collections.Counter))
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        module = case.get("classname").split(".")[-1].removeprefix("test_")
        name, _, parameters = case.get("name").partition("[")
        named = [n for n in IMPLEMENTATIONS if re.search(rf"\b{n}\b", parameters.replace("-", " "))]
        suffix = module.rpartition("_")[2]
        column = named[0] if named else suffix if suffix in IMPLEMENTATIONS else "all"
        table[module, name.removeprefix("test_").replace("_", " ")][column][outcome(case)] += 1
    return table


def main(path: str) -> None:
    """Prints a Markdown table: numbers are cases passed (and failed or skipped)."""
    columns = (*IMPLEMENTATIONS, "all")
    print("| op | what is tested | " + " | ".join(columns) + " |")
    print("|---" * (2 + len(columns)) + "|")
    for (module, name), found in sorted(rows(path).items()):
        cells = []
        for column in columns:
            counts = found[column]
            parts = [str(counts["passed"])] if counts["passed"] else []
            parts += [f"{counts[kind]} {kind}" for kind in ("failed", "skipped") if counts[kind]]
            cells.append(", ".join(parts))
        print(f"| {module} | {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main(*sys.argv[1:])
