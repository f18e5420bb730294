#!/usr/bin/env python3
"""A training in C++ under PyTorch's torchrun: run_torchrun.py BIN_DIR

A rank is killed in the middle of the training. torchrun's agents restart all ranks, which resume from the newest
checkpoint, and the losses equal those of a training without interruption. With one agent and each kind of rendezvous, and
with two agents, of which each counts its own restarts.
"""

import functools
import os
import pathlib
import random
import re
import signal
import socket
import sys
import tempfile
import time

from launches import Launch, Failure, TRAINING, check, check_losses, losses, run_tests

LIMIT = 240  # seconds, many times what each takes
STEPS, SAVE_EVERY, KILL_AFTER = 240, 20, 30
TORCHRUN = [sys.executable, pathlib.Path(__file__).resolve().parent / "torchrun.py"]


def free_port():
    """A free port that no socket is given by the system: another job's would take this job's ranks for its own."""
    first_given = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(10000, first_given), 100):
        with socket.socket() as listener:
            try:
                listener.bind(("", port))
            except OSError:
                continue
            return port
    raise Failure("no free port")


def training(programs, checkpoints):
    return [programs / "train_gpt", *TRAINING, "--directory", checkpoints, "--steps", STEPS, "--save-every", SAVE_EVERY]


def process_of(rank, checkpoints):
    """The newest process of train_gpt that has this rank and writes to `checkpoints`."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
            variables = (entry / "environ").read_bytes().split(b"\0")
        except (OSError, NotADirectoryError):
            continue
        if arguments[0].endswith(b"/train_gpt") and checkpoints.encode() in arguments and b"RANK=%d" % rank in variables:
            found.append(int(entry.name))
    check(found, f"no process of rank {rank}")
    return max(found)


def kill_in_the_middle(launch, directory, checkpoints, rank):
    while not any(step >= KILL_AFTER for step in losses_so_far(directory / checkpoints)) or not list(
            (directory / checkpoints).glob("step-*/.metadata")):
        check(launch.process.poll() is None, f"the training ended before step {KILL_AFTER}:\n{launch.output()[-6000:]}")
        if time.monotonic() - launch.begin > LIMIT:
            raise Failure(f"no step {KILL_AFTER} within {LIMIT} s:\n{launch.output()[-6000:]}")
        time.sleep(0.05)
    os.kill(process_of(rank, checkpoints), signal.SIGKILL)


def losses_so_far(checkpoints):
    try:
        return losses(checkpoints)
    except (OSError, KeyError, ValueError, TypeError):
        return {}


def check_resumed(output, directory, checkpoints, expected):
    resumed = re.findall(r"resumed from step (\d+)$", output, re.M)
    check(resumed and int(resumed[-1]) % SAVE_EVERY == 0 and 0 < int(resumed[-1]) < STEPS,
          f"resumed from {resumed}, expected once from a step between 0 and {STEPS}:\n{output[-6000:]}")
    check_losses(directory / checkpoints, expected, 0, "after a restart")
    return f"resumed from step {resumed[-1]}"


def restart_of_one_agent(programs, directory, expected, name, options):
    launch = Launch([*TORCHRUN, *options, "--no-python", "--nproc-per-node", 3, "--max-restarts", 2,
                     *training(programs, name)], directory)
    try:
        kill_in_the_middle(launch, directory, name, 1)
        return check_resumed(launch.succeed(LIMIT), directory, name, expected)
    finally:
        launch.kill()


def restart_of_two_agents(programs, directory, expected):
    command = [*TORCHRUN, "--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}",
               "--rdzv-id", "two", "--local-addr", "127.0.0.1", "--no-python", "--nproc-per-node", 2,
               "--max-restarts", 3, *training(programs, "two")]
    agents = [Launch(command, directory), Launch(command, directory)]
    try:
        kill_in_the_middle(agents[0], directory, "two", 1)
        output = "".join(agent.succeed(LIMIT) for agent in agents)
        return check_resumed(output, directory, "two", expected)
    finally:
        for agent in agents:
            agent.kill()


def main():
    programs = pathlib.Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        tests = []
        for ranks in (3, 4):
            Launch([programs / "tessera", "run", "-n", ranks, "--", *training(programs, f"expected-{ranks}")],
                   directory).succeed(LIMIT)
        of_three, of_four = losses(directory / "expected-3"), losses(directory / "expected-4")
        for case, options in (("standalone", ["--standalone"]),
                              ("static", ["--master-addr", "127.0.0.1", "--master-port", free_port()]),
                              ("c10d", ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"])):
            test = functools.partial(restart_of_one_agent, programs, directory, of_three, case, options)
            test.__name__ = f"restart_of_one_agent_{case}"
            tests.append(test)
        test = functools.partial(restart_of_two_agents, programs, directory, of_four)
        test.__name__ = "restart_of_two_agents"
        tests.append(test)
        run_tests(tests)


main()
