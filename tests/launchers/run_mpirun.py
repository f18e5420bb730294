#!/usr/bin/env python3
"""Programs on MPI under mpirun: run_mpirun.py MPIRUN BIN_DIR

Collectives, a training sharded over three ranks that equals one of one rank, resumed on two; and ranks that die, exit or
throw while the others wait in MPI: all end in time, with a message that names the rank.
"""

import functools
import pathlib
import re
import sys
import tempfile

from launches import Launch, TRAINING, check, check_losses, losses, run_tests

LIMIT = 120  # seconds, many times what each takes
LIVENESS_MS = 3000
# Open MPI refuses root and more ranks than processors. Its ranks wait without the processor then.
OPTIONS = ["--allow-run-as-root", "--oversubscribe"]
# mpirun ends all ranks if one dies, and itself with its status. With this option it leaves the ranks alone.
RECOVERABLE = ["--runtime-options", "recoverable,error-nonzero-status=false"]


def launch(mpirun, directory, ranks, command, options=()):
    return Launch([mpirun, *OPTIONS, *options, "-n", ranks, *command], directory)


def collectives(mpirun, programs, directory):
    output = launch(mpirun, directory, 3, [programs / "mpi_ranks", "collectives"]).succeed(LIMIT)
    check(output.count("good\n") == 1, f"expected 'good' once in:\n{output}")


def training_and_resuming(mpirun, programs, directory):
    train = [programs / "train_gpt", *TRAINING, "--save-every", 4]
    Launch([*train, "--directory", "alone", "--steps", 12], directory).succeed(LIMIT)
    expected = losses(directory / "alone")
    on_mpi = [*train, "--backend", "mpi", "--directory", "sharded"]
    output = launch(mpirun, directory, 3, [*on_mpi, "--steps", 8]).succeed(LIMIT)
    check("3 ranks;" in output, f"no '3 ranks' in:\n{output}")
    check_losses(directory / "sharded", {step: expected[step] for step in range(1, 9)}, 1e-4, "three ranks")
    output = launch(mpirun, directory, 2, [*on_mpi, "--steps", 12]).succeed(LIMIT)
    check("2 ranks;" in output and "resumed from step 8\n" in output, f"did not resume from step 8:\n{output}")
    check_losses(directory / "sharded", expected, 1e-4, "two ranks")
    Launch([programs / "tessera", "verify", "sharded/step-12"], directory).succeed(LIMIT)


# Their subgroups are on Gloo. Each job on a host has a port of its own.
def jobs_of_hybrid_sharding_at_once(mpirun, programs, directory):
    expected = losses(directory / "alone")
    names = ["job-1", "job-2"]
    train = [programs / "train_gpt", *TRAINING, "--backend", "mpi", "--strategy", "hybrid_shard", "--shard-ranks", 2,
             "--steps", 12, "--directory"]
    jobs = [launch(mpirun, directory, 4, [*train, name]) for name in names]
    for job, name in zip(jobs, names):
        check("4 ranks;" in job.succeed(LIMIT), f"no '4 ranks' in:\n{job.output()}")
        check_losses(directory / name, expected, 1e-4, "hybrid sharding")


def a_killed_rank_ends_all(mpirun, programs, directory):
    run = launch(mpirun, directory, 3, [programs / "mpi_ranks", "die", LIVENESS_MS])
    run.fail_with(30, r"process rank 2 [^\n]*exited on\s+signal 9")
    return f"ended after {run.seconds:.1f} s by mpirun"


def a_killed_rank_is_named(mpirun, programs, directory):
    run = launch(mpirun, directory, 3, [programs / "mpi_ranks", "die", LIVENESS_MS], RECOVERABLE)
    _, output = run.wait(30)
    message = rf"after ([\d.]+) s: all_reduce on rank \d of 3 \(world\): rank 2 died: no sign of life for {LIVENESS_MS} ms"
    waited = [float(each) for each in re.findall(message, output)]
    check(len(waited) == 2, f"expected an error on two ranks:\n{output}")
    check(max(waited) < LIVENESS_MS / 1000 + 3, f"it took {max(waited)} s:\n{output}")
    return f"named after {min(waited)} and {max(waited)} s"


def a_rank_that_exits_ends_all(mpirun, programs, directory):
    launch(mpirun, directory, 3, [programs / "mpi_ranks", "exit", LIVENESS_MS]).fail_with(30, r"@\d+,2\]|process rank 2 ")


def a_rank_that_throws_is_named(mpirun, programs, directory):
    launch(mpirun, directory, 3, [programs / "mpi_ranks", "throw", LIVENESS_MS]).fail_with(
        30, "rank 2 has had enough", "rank 2 left the group")


def ranks_that_mpirun_did_not_start_are_refused(_, programs, directory):
    Launch([programs / "tessera", "run", "-n", 2, "--", programs / "mpi_ranks", "collectives"], directory).fail_with(
        LIMIT, r"this is rank 0 of 1 for MPI, expected rank \d of 2")


def main():
    mpirun, programs = sys.argv[1], pathlib.Path(sys.argv[2]).resolve()
    with tempfile.TemporaryDirectory() as name:
        tests = []
        for test in (collectives, training_and_resuming, jobs_of_hybrid_sharding_at_once, a_killed_rank_ends_all, a_killed_rank_is_named,
                     a_rank_that_exits_ends_all, a_rank_that_throws_is_named,
                     ranks_that_mpirun_did_not_start_are_refused):
            bound = functools.partial(test, mpirun, programs, pathlib.Path(name))
            tests.append(functools.update_wrapper(bound, test))
        run_tests(tests)


main()
