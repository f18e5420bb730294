#!/usr/bin/python3
"""Checks what the command prints with --json against the schemas in docs/json, and the shipped maps against theirs.

    json_schema_test.py TESSERA SOURCE_FOLDER

Members that a schema does not list are errors here. Needs python3-jsonschema, of Debian. Without it the test fails if CI=true, and
otherwise prints a warning and exits with 77 (skipped).
"""

import copy
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

try:
    import jsonschema
except ImportError:
    print("python3-jsonschema is not installed", file=sys.stderr)
    sys.exit(1 if os.environ.get("CI") == "true" else 77)


def closed(schema):
    """The schema, with no members but those that it lists."""
    schema = copy.deepcopy(schema)

    def close(node):
        if isinstance(node, dict):
            if "properties" in node and node.get("type") in ("object", ["object", "null"]):
                node.setdefault("additionalProperties", False)
            for value in node.values():
                close(value)
        elif isinstance(node, list):
            for value in node:
                close(value)

    close(schema)
    return schema


def validator(path):
    schema = json.loads(path.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(closed(schema))


class Checks:
    def __init__(self, tessera, source):
        self.tessera = tessera
        self.schemas = {path.name.removesuffix(".schema.json"): validator(path) for path in (source / "docs/json").glob("*.json")}
        self.seen = {}
        self.ran = []  # (name of the schema, arguments)
        self.failed = []

    def run(self, *arguments, status=0):
        done = subprocess.run([self.tessera, *map(str, arguments)], capture_output=True, text=True, check=False)
        if done.returncode != status:
            self.failed.append(f"{arguments}: status {done.returncode}, expected {status}: {done.stderr}")
        return done.stdout

    def check(self, *arguments, status=0):
        text = self.run(*arguments, "--json", status=status)
        try:
            output = json.loads(text)
            name = re.fullmatch(r"tessera/(.*)/[0-9]+", output["schema"])[1]
            errors = list(self.schemas[name].iter_errors(output))
        except (ValueError, KeyError, TypeError) as error:
            self.failed.append(f"{arguments}: {error!r}: {text[:200]}")
            return
        self.seen[name] = output
        self.ran.append((name, {str(argument) for argument in arguments}))
        for error in errors:
            self.failed.append(f"{arguments}: {name}: {error.json_path}: {error.message[:300]}")

    def check_page(self, page):
        """Each command of the page's table has printed what its row states, and is in the title of the schema."""
        rows = re.findall(r"^\| (`tessera .*) \| \[([a-z-]+)\]", page, re.M)
        if {name for _, name in rows} != self.schemas.keys():
            self.failed.append(f"schemas of docs/json/README.md: {rows}, expected {sorted(self.schemas)}")
        for commands, name in rows:
            title = self.schemas[name].schema["title"]
            if commands.replace("`", "") != title:
                self.failed.append(f"{name}: the title is {title!r}, expected {commands!r} as in docs/json/README.md")
            for command in re.findall(r"`tessera ([^`]*) --json`", commands):
                if not any(ran == name and set(command.split()) <= arguments for ran, arguments in self.ran):
                    self.failed.append(f"'tessera {command} --json' has printed nothing of {name}")

    def check_that_checks_can_fail(self):
        for name, output in self.seen.items():
            for member in output:
                without = {key: value for key, value in output.items() if key != member}
                required = member in self.schemas[name].schema["required"]
                if self.schemas[name].is_valid(without) == required:
                    self.failed.append(f"{name}: without '{member}': expected {'not ' if required else ''}valid")
            if self.schemas[name].is_valid({**output, "unlisted": 1}):
                self.failed.append(f"{name}: a member that is not listed is valid")


def truncate(path):
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 1)


def main():
    source = pathlib.Path(sys.argv[2])
    checks = Checks(sys.argv[1], source)
    golden = source / "tests/golden/checkpoints"
    with tempfile.TemporaryDirectory() as name:
        scratch = pathlib.Path(name)
        checkpoints = sorted(path for path in golden.glob("*/ck") if is_good(checks.tessera, path))
        assert len(checkpoints) > 10, checkpoints
        for path in checkpoints:
            for options in [], ["--tree"], ["--du"]:
                checks.check("inspect", path, *options)
            checks.check("verify", path)
            checks.check("stats", path)
        optim = golden / "2.14-optim/ck"
        other = golden / "2.14-dtensor/ck"

        checks.check("diff", optim, optim)
        checks.check("diff", optim, other, status=1)
        checks.check("diff", golden / "2.6-dtensor/ck", other, "--atol", "1e-9", status=1)
        checks.check("convert", optim, scratch / "a.safetensors")
        checks.check("convert", optim, scratch / "dry.pt", "--dry-run")
        (scratch / "run").mkdir()
        checks.check("reshard", optim, scratch / "run/step-1", "--ranks", "2")
        checks.check("convert", optim, scratch / "b.pt", "--rename", "s/^model/m/", "--check")
        checks.check("convert", optim, scratch / "b.pt", "--rename", "s/^nothing/m/", "--check", status=1)
        checks.check("reshard", optim, scratch / "c", "--ranks", "2", "--rename", "s/^model/m/", "--check")
        checks.check("sum", shutil.copytree(optim, scratch / "copy"), "--force")
        checks.check("plan", "--ranks", 4, "--tensors", 10)

        shutil.copytree(scratch / "run/step-1", scratch / "run/step-2")
        shutil.copytree(scratch / "run/step-1", scratch / "run/step-3")
        truncate(next((scratch / "run/step-3").glob("*.distcp")))
        checks.check("ls", scratch / "run")
        checks.check("inspect", scratch / "run", "--steps")
        checks.check("inspect", scratch / "run", "--verify")
        checks.check("verify", scratch / "run/step-3", status=1)
        checks.check("prune", scratch / "run", "--keep", 1, "--dry-run")
        checks.check("prune", scratch / "run", "--keep", 1)
        diff_of_elements(checks, scratch)

        unseen = checks.schemas.keys() - checks.seen.keys()
        if unseen:
            checks.failed.append(f"schemas of no output: {sorted(unseen)}")
        page = (source / "docs/json/README.md").read_text()
        checks.check_page(page)
        commands = re.findall(r"^  ([a-z]+) +[A-Z]", checks.run("--help"), re.M)
        with_json = {command for command in commands if "--json" in checks.run(command, "--help")}
        listed = set(re.findall(r"`tessera ([a-z]+) [^`]*--json`", page)) - {"ls"}  # an alias
        if with_json != listed or not with_json:
            checks.failed.append(f"commands with --json: {sorted(with_json)}, in docs/json/README.md: {sorted(listed)}")

    check_maps(checks, source)
    checks.check_that_checks_can_fail()
    print("\n".join(checks.failed) or f"{len(checks.seen)} schemas are good")
    return 1 if checks.failed else 0


def is_good(tessera, path):
    return subprocess.run([tessera, "verify", path, "--quiet"], capture_output=True, check=False).returncode == 0


def diff_of_elements(checks, scratch):
    """Differences of elements have members of their own."""
    one, two = scratch / "one.safetensors", scratch / "two.safetensors"
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "b": {"dtype": "F8_E8M0", "shape": [1], "data_offsets": [8, 9]}}).encode()
    for path, elements in (one, b"\0\0\0\0\0\0\x80\x3f\1"), (two, b"\0\0\0\0\0\0\xc0\x7f\2"):
        path.write_bytes(len(header).to_bytes(8, "little") + header + elements)
    checks.check("diff", one, two, status=1)
    checks.check("stats", two)


def check_maps(checks, source):
    schema = validator(source / "docs/formats/tensor_map.schema.json")
    maps = sorted((source / "assets/maps").glob("*.json"))
    assert len(maps) >= 6, maps
    for path in maps:
        for error in schema.iter_errors(json.loads(path.read_text())):
            checks.failed.append(f"{path.name}: {error.json_path}: {error.message[:300]}")


if __name__ == "__main__":
    sys.exit(main())
