"""What pytest found on a GPU, as JSON with the conditions: python -m benchmarks.gpu_report FOUND.xml RESULT.json"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.sglang_engines import save


def main() -> None:
    found, result = map(Path, sys.argv[1:])
    tests = {}
    for case in ElementTree.parse(found).iter("testcase"):
        printed = "".join(part.text or "" for part in case.iter("system-out"))
        printed += "".join(part.get("message", "") for part in case.iter("skipped"))  # e.g. for want of a second GPU
        outcome = next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), "passed")
        seconds = float(case.get("time", 0.0))
        tests[case.get("name", "")] = {"outcome": outcome, "seconds": seconds, "printed": printed[-2000:]}
    outcomes = {test["outcome"] for test in tests.values()}
    if "passed" not in outcomes or outcomes - {"passed", "skipped"}:
        sys.exit(f"gpu_report: of {found} not every test passed: {tests}")
    save(result, {"tests": tests})


if __name__ == "__main__":
    main()
