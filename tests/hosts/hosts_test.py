#!/usr/bin/env python3
"""Runs programs on several hosts: hosts_test.py BIN_DIR CASE.

Cases: see CASES. Exit status 77 if this machine does not permit namespaces.
"""

import csv
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import network
from network import Container, Host, User

SMALL = ["--layers", "2", "--width", "16", "--context", "16", "--batch", "12"]
END_SECONDS = 15  # in which all ranks end after a host was disconnected; a dead rank is found after 10
LIMIT_SECONDS = 100


class Failure(Exception):
    pass


def check(is_so, message):
    if not is_so:
        raise Failure(message)


class Rank:
    """A rank of a program, in a place: a host or a container."""

    def __init__(self, number, size, place, master, command, log):
        environment = dict(os.environ, RANK=str(number), WORLD_SIZE=str(size), MASTER_ADDR=master, MASTER_PORT="29500",
                           GLOO_SOCKET_IFNAME="eth0", TP_SOCKET_IFNAME="eth0", OMP_NUM_THREADS="1",
                           GLOG_minloglevel="2")
        self.name, self.log, self.seconds = f"rank {number} ({place.name})", log, None
        with log.open("w") as out:
            self.process = subprocess.Popen([*place.prefix, *command], env=environment, stdin=subprocess.DEVNULL,
                                            stdout=out, stderr=subprocess.STDOUT)

    def output(self):
        return self.log.read_text(errors="replace")

    def has_ended(self, since):
        if self.process.poll() is not None and self.seconds is None:
            self.seconds = time.monotonic() - since
        return self.seconds is not None


class Job:
    """A program on all ranks, one for each place."""

    def __init__(self, places, command, scratch):
        logs = pathlib.Path(tempfile.mkdtemp(dir=scratch))
        self.ranks = [Rank(i, len(places), place, places[0].address, command, logs / f"rank-{i}")
                      for i, place in enumerate(places)]

    def outputs(self):
        return "".join(f"--- {rank.name}: {rank.process.poll()}\n{rank.output()[-3000:]}" for rank in self.ranks)

    def wait_for_step(self, step):
        deadline = time.monotonic() + LIMIT_SECONDS
        while not any(int(found) >= step for found in re.findall(r"^step +(\d+) ", self.ranks[0].output(), re.M)):
            check(time.monotonic() < deadline and self.ranks[0].process.poll() is None,
                  f"step {step} was not reached:\n{self.outputs()}")
            time.sleep(0.02)

    def wait(self, seconds=LIMIT_SECONDS):
        """Waits until all ranks have ended."""
        since = time.monotonic()
        while not all([rank.has_ended(since) for rank in self.ranks]):
            check(time.monotonic() - since < seconds, f"ranks still run after {seconds} s:\n{self.outputs()}")
            time.sleep(0.02)

    def succeed(self):
        self.wait()
        check(all(rank.process.returncode == 0 for rank in self.ranks), f"a rank failed:\n{self.outputs()}")
        return self

    def expect_errors(self, messages):
        """Expects every rank to end in time, of itself, with exit status 1 and the message with its number."""
        self.wait(END_SECONDS)
        print(", ".join(f"{rank.name} ended after {rank.seconds:.1f} s" for rank in self.ranks))
        for rank, message in zip(self.ranks, messages):
            check(rank.process.returncode == 1 and re.search(message, rank.output()),
                  f"{rank.name}: expected exit status 1 and '{message}':\n{self.outputs()}")


class Training:
    """Runs train_gpt on hosts, with checkpoints in one directory, which all hosts share."""

    def __init__(self, binaries, scratch):
        self.binaries, self.scratch, self.directory = binaries, scratch, scratch / "checkpoints"

    def start(self, places, steps, *flags):
        command = [self.binaries / "train_gpt", *SMALL, "--directory", self.directory, "--steps", str(steps), *flags]
        return Job(places, list(map(str, command)), self.scratch)

    def on_one_rank(self, place, steps):
        """Returns the training on one rank that continues from a copy of the checkpoints, if there are any."""
        other = Training(self.binaries, self.scratch)
        other.directory = pathlib.Path(tempfile.mkdtemp(dir=self.scratch)) / "alone"
        if self.directory.exists():
            shutil.copytree(self.directory, other.directory)
        other.start([place], steps).succeed()
        return other

    def losses(self):
        """The loss of each step."""
        with (self.directory / "loss.csv").open() as file:
            return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file)}

    def verify(self, step):
        done = subprocess.run([self.binaries / "tessera", "verify", self.directory / f"step-{step}"],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        return done.returncode == 0

    def newest_good(self):
        """The step of the newest checkpoint that `tessera verify` accepts."""
        steps = [int(path.name.removeprefix("step-")) for path in self.directory.glob("step-*")]
        good = [step for step in steps if self.verify(step)]
        check(good, f"no good checkpoint of the steps {steps}")
        return max(good)


def expect_same_losses(found, expected, steps):
    for step in steps:
        check(step in found and step in expected and abs(found[step] - expected[step]) < 1e-4,
              f"step {step}: loss {found.get(step)}, expected {expected.get(step)} as on one rank")


def resume_and_compare(training, places):
    """Resumes the training from the newest good checkpoint and compares its losses with those of one rank."""
    newest = training.newest_good()
    expected = training.on_one_rank(places[0], newest + 5).losses()
    job = training.start(places, newest + 5).succeed()
    check(f"resumed from step {newest}\n" in job.ranks[0].output(), f"expected step {newest}:\n{job.outputs()}")
    expect_same_losses(training.losses(), expected, range(newest + 1, newest + 6))


def reshard(training, places, *expected):
    job = Job(places, [str(training.binaries / "reshard_on_hosts")], training.scratch).succeed()
    for line in expected:
        check(line in job.ranks[0].output().splitlines(), f"expected that {line}:\n{job.outputs()}")


def train(training):
    """Two hosts with two ranks each, three hosts, two hosts, each resuming where the last one stopped."""
    hosts = [Host(i) for i in range(3)]
    expected = training.on_one_rank(hosts[0], 12).losses()
    training.start([hosts[0], hosts[0], hosts[1], hosts[1]], 4).succeed()
    for places, before, steps in ((hosts, 4, 8), (hosts[1:], 8, 12)):
        job = training.start(places, steps).succeed()
        check(f"resumed from step {before}\n" in job.ranks[0].output(), job.outputs())
    expect_same_losses(training.losses(), expected, range(1, 13))
    check(expected[12] < expected[1] - 0.1, f"losses went from {expected[1]} to {expected[12]}, expected 0.1 less")
    check(training.verify(12), "the last checkpoint is damaged")
    reshard(training, hosts, "no memory is shared")
    reshard(training, [hosts[0]] * 2, "memory is shared")


def link(training):
    """Collectives of two hosts and of three with two ranks each: no byte reaches a host twice."""
    hosts = [Host(i) for i in range(3)]
    for count in (2, 3):
        places = [host for host in hosts[:count] for _ in range(2)]
        command = [str(training.binaries / "collectives_on_hosts"), str(count)]
        print(Job(places, command, training.scratch).succeed().ranks[0].output(), end="")


def disconnect(training, victim, messages):
    """Disconnects one of three hosts at a random time of a training that saves often, and connects it again after all
    ranks have ended.
    """
    hosts = [Host(i) for i in range(3)]
    expected = training.on_one_rank(hosts[0], 12).losses()
    job = training.start(hosts, 1_000_000, "--save-every", "2")
    job.wait_for_step(12)
    time.sleep(random.uniform(0, 0.3))
    hosts[victim].disconnect()
    job.expect_errors(messages)
    expect_same_losses(training.losses(), expected, range(1, 13))
    hosts[victim].connect()
    resume_and_compare(training, hosts)


def disconnect_last(training):
    disconnect(training, 2, ["rank 2 died: no sign of life for 10000 ms"] * 2 + ["rank 0, which keeps the store, is gone"])


def disconnect_store(training):
    store_is_gone = "rank 0, which keeps the store, is gone"
    disconnect(training, 0, ["rank [12] died: no sign of life for 10000 ms", store_is_gone, store_is_gone])


def flicker(training):
    """A link that is down when the ranks start, and later for less than it takes to find a rank dead, delays the training
    and does nothing else. Then both hosts crash, and two others resume.
    """
    hosts = [Host(i) for i in range(2)]
    hosts[1].disconnect()
    job = training.start(hosts, 1_000_000, "--save-every", "5")
    time.sleep(2)
    hosts[1].connect()
    job.wait_for_step(12)
    for seconds in (0.3, 3):
        hosts[1].disconnect()
        time.sleep(seconds)
        last = max(training.losses())
        hosts[1].connect()
        job.wait_for_step(last + 3)
    check(all(rank.process.poll() is None for rank in job.ranks), f"a rank ended:\n{job.outputs()}")
    for host in hosts:
        host.crash()
    job.wait()
    resume_and_compare(training, [Host(2), Host(3)])


def containers(training):
    """Two containers on one host and one on another, whose processes have equal ids."""
    hosts = [Host(i) for i in range(2)]
    places = [Container(hosts[0]), Container(hosts[0]), Container(hosts[1])]
    reshard(training, places, "no memory is shared")
    reshard(training, places[:2], "memory is shared")
    expected = training.on_one_rank(hosts[0], 8).losses()
    training.start(places, 4).succeed()
    training.start(places[1:], 8).succeed()
    expect_same_losses(training.losses(), expected, range(1, 9))
    check(training.verify(8), "the last checkpoint is damaged")


def users(training):
    """Two users of one host share memory, although neither may read the other's."""
    host = Host(0)
    program = training.binaries / "reshard_on_hosts"
    reshard(training, [User(host, number, program) for number in (1001, 1002)], "memory is shared")


CASES = {each.__name__: each for each in (train, link, disconnect_last, disconnect_store, flicker, containers, users)}


def main():
    if len(sys.argv) != 3 or sys.argv[2] not in CASES:
        sys.exit(f"usage: hosts_test.py BIN_DIR {'|'.join(CASES)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    network.isolate([network.HOST] + ([network.CONTAINER] if sys.argv[2] == "containers" else []))
    with tempfile.TemporaryDirectory(prefix="tessera-hosts-") as scratch:
        begin = time.monotonic()
        try:
            CASES[sys.argv[2]](Training(pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(scratch)))
        except Failure as failure:
            sys.exit(f"{sys.argv[2]}: {failure}")
        print(f"{sys.argv[2]}: good, {time.monotonic() - begin:.1f} s")


main()
