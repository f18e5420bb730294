"""What was checked and how it ended."""

import collections
import threading

STEPS = ["inspect", "verify", "map", "convert", "chain", "reshard", "resave", "versions"]
SHOWN_FAILURES = 3  # of one step of one checkpoint
SHOWN_CHARACTERS = 400


class Report:
    def __init__(self):
        self._lock = threading.Lock()
        self._counts = collections.defaultdict(lambda: collections.defaultdict(lambda: [0, 0]))
        self._failures = collections.defaultdict(list)

    def add(self, row, step, what, ok, why=""):
        with self._lock:
            self._counts[row][step][0 if ok else 1] += 1
            if not ok:
                failure = f"{row}: {step}: {what}: {why[:SHOWN_CHARACTERS]}"
                if len(self._failures[row, step]) < SHOWN_FAILURES:
                    print(f"FAILED {failure}", flush=True)  # at once, in case that something ends the run
                self._failures[row, step].append(failure)

    def failed(self):
        return sum(map(len, self._failures.values()))

    def print(self, versions, seconds):
        columns = STEPS + [f"torch {version}" for version in versions]
        print("\nPassed of those tried, by the checkpoint's writer and name:\n")
        print(f"{'':28}" + "".join(f"{column:>12}" for column in columns))
        passed = 0
        for row in sorted(self._counts):
            cells = []
            for column in columns:
                good, bad = self._counts[row][column] if column in self._counts[row] else (0, 0)
                passed += good
                cells.append(f"{good}/{good + bad}" + ("!" if bad else "") if good + bad else "-")
            print(f"{row:28}" + "".join(f"{cell:>12}" for cell in cells))
        if self._failures:
            print("\nFailures:")
            for (row, step), failures in sorted(self._failures.items()):
                for failure in failures[:SHOWN_FAILURES]:
                    print(f"  {failure}")
                if len(failures) > SHOWN_FAILURES:
                    print(f"  {row}: {step}: and {len(failures) - SHOWN_FAILURES} more")
        print(f"\ninterop: {passed} passed, {self.failed()} failed, in {seconds:.0f} s")
