"""What the tests of launchers share: running a command with a limit, and the losses that train_gpt wrote."""

import csv
import os
import re
import signal
import subprocess
import sys
import time

# A small model, and enough steps to be interrupted.
TRAINING = ["--batch", "12", "--context", "16", "--layers", "1", "--heads", "2", "--width", "32"]


class Failure(Exception):
    pass


def check(condition, what):
    if not condition:
        raise Failure(what)


class Launch:
    """A command in a process group of its own, with its output in a file."""

    def __init__(self, command, directory, environment=None):
        self.command = [str(each) for each in command]
        self.log = directory / f"log-{time.monotonic_ns()}.txt"
        self.begin = time.monotonic()
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(self.command, cwd=directory, stdin=subprocess.DEVNULL, stdout=log,
                                            stderr=subprocess.STDOUT, start_new_session=True,
                                            env=dict(os.environ, OMP_NUM_THREADS="1", **(environment or {})))

    def output(self):
        return self.log.read_text(encoding="utf-8", errors="replace")

    def kill(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def wait(self, limit):
        """Returns exit status and output. Fails after `limit` seconds."""
        try:
            status = self.process.wait(timeout=max(0, limit - (time.monotonic() - self.begin)))
        except subprocess.TimeoutExpired:
            self.kill()
            raise Failure(f"$ {' '.join(self.command)}\ndid not end within {limit} s:\n{self.output()[-6000:]}") from None
        self.seconds = time.monotonic() - self.begin
        return status, self.output()

    def succeed(self, limit):
        status, output = self.wait(limit)
        check(status == 0, f"$ {' '.join(self.command)}\nexit status {status}:\n{output[-6000:]}")
        return output

    def fail_with(self, limit, *patterns):
        """Waits for the command to fail with an output that has all patterns."""
        status, output = self.wait(limit)
        check(status != 0, f"$ {' '.join(self.command)}\nexit status 0, expected an error:\n{output[-6000:]}")
        for pattern in patterns:
            check(re.search(pattern, output), f"$ {' '.join(self.command)}\nno '{pattern}' in:\n{output[-6000:]}")
        return output


def losses(checkpoints):
    """The losses of train_gpt by step. A step that ran twice has its last."""
    with open(checkpoints / "loss.csv", encoding="utf-8") as file:
        return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file)}


def check_losses(checkpoints, expected, tolerance, what):
    found = losses(checkpoints)
    check(sorted(found) == sorted(expected), f"{what}: steps {sorted(found)}, expected {sorted(expected)}")
    for step, loss in expected.items():
        check(abs(found[step] - loss) <= tolerance, f"{what}: the loss of step {step} is {found[step]}, expected {loss}")


def run_tests(tests):
    """Runs functions, prints a line for each, and ends the process."""
    failed = 0
    for test in tests:
        begin = time.monotonic()
        try:
            note = test() or ""
            print(f"ok      {test.__name__}  {time.monotonic() - begin:.1f} s  {note}", flush=True)
        except Failure as failure:
            failed += 1
            print(f"FAILED  {test.__name__}: {failure}", flush=True)
    sys.exit(1 if failed else 0)
