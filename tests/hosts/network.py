"""Hosts made of namespaces: each has its own network, processes, host name and mounts, and is joined to a bridge.

isolate() restarts the program in namespaces of its own. All hosts, links and processes are in these, so nothing is left
when the program ends, however it ends, and programs that run at the same time do not meet.
"""

import os
import pathlib
import shutil
import subprocess
import sys

SKIPPED = 77
HOST = ["--net", "--pid", "--uts", "--ipc", "--mount", "--fork", "--kill-child", "--mount-proc"]
CONTAINER = ["--user", "--map-root-user", "--pid", "--uts", "--ipc", "--mount", "--fork", "--kill-child", "--mount-proc"]
BRIDGE = "hosts"


def run(*words):
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)


def skip(why):
    print(f"skipped: {why}")
    sys.exit(SKIPPED)


def isolate(kinds):
    """Continues in new namespaces, in which this program may make namespaces of these kinds: HOST, CONTAINER. Skips the
    test where that is not allowed.
    """
    if os.environ.get("TESSERA_HOSTS") == "isolated":
        run("ip", "link", "add", BRIDGE, "type", "bridge")
        run("ip", "link", "set", BRIDGE, "up")
        return
    for tool, package in (("unshare", "util-linux"), ("nsenter", "util-linux"), ("ip", "iproute2")):
        if shutil.which(tool) is None:
            skip(f"there is no command '{tool}'; install the package {package}")
    # Users may have all rights in a user namespace of their own, if the kernel permits it.
    own = ["unshare"] + (["--user", "--map-root-user"] if os.geteuid() != 0 else []) + HOST
    test = "ip link add test0 type bridge && ip link add test1 type veth peer name test2 && exec unshare \"$@\" true"
    for needed in kinds:
        tried = subprocess.run(own + ["sh", "-c", test, "sh"] + needed, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if tried.returncode != 0:
            skip(f"no right to make hosts of namespaces: {tried.stdout.strip()}")
    os.environ["TESSERA_HOSTS"] = "isolated"
    sys.stdout.flush()
    os.execvp("unshare", own + [sys.executable] + sys.argv)


def wait_until_ready(keeper):
    """Returns the process id of the first process in the namespaces that `keeper`, an unshare, has made."""
    if keeper.stdout.readline() != "ready\n":
        sys.exit("a host does not start")
    return int(pathlib.Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text().split()[0])


class Host:
    """A host with the address 10.77.0.<number + 1> on its interface eth0."""

    def __init__(self, number):
        self.name, self.address, self.link = f"host{number}", f"10.77.0.{number + 1}", f"to-host{number}"
        script = f"hostname {self.name} && ip link set lo up && echo ready && exec sleep infinity"
        self.keeper = subprocess.Popen(["unshare", *HOST, "sh", "-c", script], stdin=subprocess.DEVNULL,
                                       stdout=subprocess.PIPE, text=True)
        pid = str(wait_until_ready(self.keeper))
        # In a chroot, --mount alone leads to the root of the machine.
        self.prefix = ["nsenter", "--target", pid, "--net", "--pid", "--uts", "--ipc", "--mount", "--root", "--wd", "--"]
        run("ip", "link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", pid)
        run("ip", "link", "set", self.link, "master", BRIDGE, "up")
        run(*self.prefix, "ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        run(*self.prefix, "ip", "link", "set", "eth0", "up")

    def crash(self):
        """Ends all processes of the host."""
        self.keeper.kill()
        self.keeper.wait()

    def disconnect(self):
        run("ip", "link", "set", self.link, "down")

    def connect(self):
        run("ip", "link", "set", self.link, "up")


class Container:
    """What a container runtime separates on one host: processes, users, mounts, shared memory. The network is the host's.

    The processes of all containers of all hosts have the same ids, and where the layout of memory may be fixed the same
    addresses.
    """

    def __init__(self, host):
        self.name, self.address = f"container on {host.name}", host.address
        script = ('mount -t tmpfs none /dev/shm || exit; '
                  'if setarch --addr-no-randomize true 2>/dev/null; then exec setarch --addr-no-randomize "$@"; fi; exec "$@"')
        self.prefix = [*host.prefix, "unshare", *CONTAINER, "sh", "-c", script, "sh"]


class User:
    """A user of a host, who may not read the memory of other users' processes."""

    def __init__(self, host, number, program):
        self.name, self.address = f"user {number} on {host.name}", host.address
        self.prefix = [*host.prefix, "setpriv", "--reuid", str(number), "--regid", str(number), "--clear-groups", "--"]
        tried = subprocess.run([*self.prefix, "test", "-x", program], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, check=False)
        if tried.returncode != 0:
            skip(f"user {number} may not run {program}: {tried.stdout.strip()}")
