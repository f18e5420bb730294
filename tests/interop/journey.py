"""What the command does with one checkpoint: every conversion and reshard, each compared with the source.

PyTorch checks the outputs later; `Journey.run` returns what it is to check.
"""

import json
import math
import shutil
import subprocess

# What a version of PyTorch computes (training) may differ from what another one does.
COMPUTED = {"optimizer", "fsdp1", "fsdp2", "pt-state_dict", "pt-training", "pt-parameters"}
FOREIGN_TO_SAFETENSORS = (
    "complex", "bcomplex", "bits", "float4", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
    "uint16", "uint32", "uint64",
)
CAST_DTYPES = ["float16", "bfloat16", "float32", "float64"]


class Journey:
    def __init__(self, tessera, case, report, resave=None):
        self.tessera, self.case, self.report, self.resaver = tessera, case, report, resave
        self.manifest = json.loads((case / "manifest.json").read_text())
        self.source = case / self.manifest["path"]
        self.kind = self.manifest["kind"]
        self.row = f"{case.parent.name} {case.name}"
        self.jobs = []

    def run(self):
        if self.kind == "refused":
            self.refuse()
            return []
        self.inspect(self.source)
        self.inspected_chunks()
        self.expect("verify", 0, "verify", self.source)
        self.map()
        self.convert()
        self.damage()
        self.chain()
        self.reshard()
        if self.kind == "dcp" and self.resaver is not None:
            self.resave()
        return self.jobs

    def objects_with_keys(self):
        """Objects that are single entries here but nested in a torch.save file, which makes no distinction."""
        if self.manifest.get("flatten", True):
            return []
        return [name for part in ("plain", "opaque") for name, text in self.manifest[part].items() if text[0] == "{"]

    # --- running the command ---

    def expect(self, step, status, *arguments):
        """Runs the command; true if it ended with `status`, and with its error in one line where that is one."""
        command = [str(argument) for argument in arguments]
        try:
            done = subprocess.run(
                [self.tessera, *command], capture_output=True, text=True, errors="replace", timeout=120, check=False
            )
        except subprocess.TimeoutExpired:
            self.report.add(self.row, step, " ".join(command), False, "hangs")
            return None
        short = " ".join(command).replace(f"{self.case.parent}/", "")
        ok = done.returncode == status
        why = f"exit status {done.returncode}, expected {status}: {(done.stderr or done.stdout).strip()[:600]}"
        if ok and status == 3 and not (done.stderr.startswith("tessera: ") and done.stderr.count("\n") == 1):
            ok, why = False, f"the error is not one line: {done.stderr[:300]}"
        self.report.add(self.row, step, short, ok, why)
        return done if ok else None

    def note(self, step, what, why):
        """Something looked at; `why` is empty where it is as it should be."""
        self.report.add(self.row, step, what, not why, why)

    def write(self, step, command, output, *arguments, excluded=()):
        """Runs a command that writes `output`, verifies that and compares it with the source."""
        if not self.expect(step, 0, command, self.source, output, *arguments):
            return False
        verified = self.expect(step, 0, "verify", output)
        return bool(verified and self.same(step, self.source, output, excluded))

    def same(self, step, a, b, excluded=()):
        return self.expect(step, 0, "diff", a, b, *exclusions(excluded))

    def job(self, check, path, **facts):
        self.jobs.append(
            {
                "id": f"{self.row}/{len(self.jobs)}", "row": self.row, "what": f"{check} {path.name}", "check": check,
                "path": str(path), "manifest": str(self.case / "manifest.json"),
                "dtypes": {tensor["dtype"] for tensor in self.manifest["tensors"].values()}, **facts,
            }
        )

    # --- what is done ---

    def refuse(self):
        self.expect("inspect", 3, "inspect", self.source)
        self.expect("convert", 3, "convert", self.source, self.case / "never", "--to", "dcp")
        left = (self.case / "never").exists()
        self.note("convert", "nothing is left", "the destination exists" if left else "")

    def inspect(self, path, manifest=None):
        done = self.expect("inspect", 0, "inspect", path, "--json")
        if not done:
            return
        try:
            why = self.disagreement(json.loads(done.stdout), manifest or self.manifest)
        except (ValueError, KeyError, TypeError) as error:
            why = f"the JSON can't be used: {error!r}"
        self.note("inspect", f"{path.name} and the manifest", why)

    @staticmethod
    def disagreement(shown, manifest):
        expected = manifest["tensors"]
        if set(shown["tensors"]) != set(expected):
            return f"tensors: {sorted(set(shown['tensors']) ^ set(expected))[:5]}"
        total = 0
        for name, tensor in shown["tensors"].items():
            facts = {"dtype": tensor["dtype"], "shape": tensor["shape"]}
            wanted = {"dtype": expected[name]["dtype"], "shape": expected[name]["shape"]}
            if facts != wanted:
                return f"{name}: found {facts}, expected {wanted}"
            covered = sum(math.prod(chunk["sizes"]) for chunk in tensor["chunks"])
            if covered != math.prod(tensor["shape"]):
                return f"{name}: the chunks have {covered} elements of {math.prod(tensor['shape'])}"
            for chunk in tensor["chunks"]:
                if chunk["offset_bytes"] + chunk["length_bytes"] > shown["files"][chunk["file"]]["bytes"]:
                    return f"{name}: a chunk extends past the end of {chunk['file']}"
            total += tensor["bytes"]
        if shown["total_bytes"] != total:
            return f"total_bytes {shown['total_bytes']}, the tensors have {total}"
        objects = manifest["plain"] | manifest["opaque"]
        if set(shown["objects"]) != set(objects):
            return f"objects: {sorted(set(shown['objects']) ^ set(objects))[:5]}"
        for name, shown_object in shown["objects"].items():
            is_opaque = name in manifest["opaque"]
            if ("opaque" in shown_object) != is_opaque:
                return f"{name}: {'understood, though it can not be' if is_opaque else shown_object['opaque']}"
            if not is_opaque and shown_object["repr"] != objects[name]:
                return f"{name}: found {shown_object['repr'][:200]}, expected {objects[name][:200]}"
        return ""

    def convert(self):
        out = self.case / "out"
        out.mkdir()
        opaque = self.manifest["opaque"]
        single, folder = out / "one.safetensors", out / "safetensors"
        for output, arguments in ((single, []), (folder, ["--max-shard-size", "500"])):
            if self.write("convert", "convert", output, "--to", "safetensors", *arguments, excluded=opaque):
                self.job("safetensors", output)
        if self.native_in_safetensors():
            self.job("huggingface", folder)
        file = out / "ck.pt"
        if self.write("convert", "convert", file, "--to", "torch", excluded=self.objects_with_keys()):
            self.job("torch", file)
            if self.kind == "dcp" and self.manifest.get("flatten", True):
                compressed = self.manifest.get("compressed", False)
                self.job("same-nested", file, reference=str(self.source), compressed=compressed)
            if self.kind == "torch":
                self.job("same-nested", file, reference=str(self.source))
        copy = out / "dcp"
        if self.write("convert", "convert", copy, "--to", "dcp"):
            self.inspect(copy)
            self.job("dcp", copy)
            if self.manifest.get("flatten", True):
                self.job("dcp-to-torch", copy)
        if self.case.name == "pt-cast":
            self.cast(out)

    def native_in_safetensors(self):
        """Whether PyTorch's own reader of safetensors knows every dtype in this state."""
        dtypes = {tensor["dtype"] for tensor in self.manifest["tensors"].values()}
        return not any(dtype.startswith(FOREIGN_TO_SAFETENSORS) for dtype in dtypes)

    def cast(self, out):
        for dtype in CAST_DTYPES:
            file = out / f"{dtype}.pt"
            if self.expect("convert", 0, "convert", self.source, file, "--to", "torch", "--dtype", dtype):
                self.expect("convert", 0, "verify", file)
                self.job("cast", file, dtype=dtype, reference=str(self.source))

    def inspected_chunks(self):
        """The reported locations of the chunks must be exact."""
        inspected = self.case / "inspected.json"
        done = self.expect("inspect", 0, "inspect", self.source, "--json")
        if done:
            inspected.write_text(done.stdout)
            if not self.manifest.get("compressed", False):
                self.job("chunks", self.source, inspected=str(inspected))
        names = list(self.manifest["tensors"])
        if names:
            done = self.expect("inspect", 0, "inspect", self.source, names[-1])
            shown = done.stdout if done else ""
            self.note("inspect", "the name asked for", "" if names[-1] in shown else f"not in {shown[:200]}")

    def map(self):
        page = self.case / "map.html"
        if not self.expect("map", 0, "map", self.source, "-o", page):
            return
        text = page.read_text()
        missing = [name for name in self.manifest["tensors"] if name not in text]
        self.note("map", "every tensor is there", f"not on the page: {missing[:5]}" if missing else "")
        complete = text.startswith("<!doctype html>") and text.rstrip().endswith("</html>")
        self.note("map", "the page is complete", "" if complete else f"it ends {text[-80:]!r}")
        fetched = [word for word in ('src="http', 'href="http', "@import", "fetch(") if word in text]
        self.note("map", "no network", f"the page has {fetched}" if fetched else "")

    def damage(self):
        """Flips one bit of a data file, of PyTorch's if it has checksums, and of ours: `verify` names the file."""
        victims = [self.case / "out" / "dcp", self.case / "out" / "safetensors"]
        if self.kind.startswith("dcp"):
            victims.append(self.source)
        for victim in victims:
            if not victim.exists():
                continue
            copy = self.case / f"damaged-{victim.name}"
            shutil.copytree(victim, copy)
            file = max([*copy.glob("*.distcp"), *copy.glob("*.safetensors")], key=lambda path: path.stat().st_size)
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 0x10
            file.write_bytes(data)
            done = self.expect("verify", 1, "verify", copy)
            named = done and file.name in done.stdout + done.stderr
            self.note("verify", f"{victim.name}: the file is named", "" if named else f"{file.name} isn't")
            shutil.rmtree(copy)

    def chain(self):
        """DCP, safetensors, DCP, torch, DCP: nothing is lost except what JSON cannot represent."""
        chain = self.case / "chain"
        chain.mkdir()
        opaque = [*self.manifest["opaque"], *self.objects_with_keys()]
        stations = [("1.safetensors", "safetensors"), ("2", "dcp"), ("3.pt", "torch"), ("4", "dcp")]
        before = self.source
        for name, kind in stations:
            after = chain / name
            if not self.expect("chain", 0, "convert", before, after, "--to", kind):
                return
            self.expect("chain", 0, "verify", after)
            self.same("chain", before, after, opaque)
            self.same("chain", self.source, after, opaque)
            before = after
        self.job("dcp", before, exclude=list(opaque))

    def reshard(self):
        folder = self.case / "reshard"
        folder.mkdir()
        dims = max([1, *(len(tensor["shape"]) for tensor in self.manifest["tensors"].values())])
        layouts = [(ranks, dim) for ranks in range(1, 8) for dim in range(dims)]
        made = []
        for ranks, dim in layouts:
            output = folder / f"{ranks}-dim{dim}"
            if self.write("reshard", "reshard", output, "--ranks", ranks, "--dim", dim):
                made.append(output)
                self.inspect(output)
                self.job("dcp", output)
                if ranks in (3, 4):
                    self.job("dtensor", output, ranks=ranks - 1, dim=dim)
        if len(made) > 1 and self.kind == "dcp":
            self.reshard_like(folder, made[-1])

    def resave(self):
        """Loads on some ranks through the library, sharded in one dimension, and saves again."""
        folder = self.case / "resave"
        folder.mkdir()
        changed = self.manifest["resaved"]
        manifest = {**self.manifest, "plain": self.manifest["plain"] | changed}
        manifest_path = folder / "manifest.json"
        manifest_path.write_text(json.dumps(manifest))
        ways = [(1, 0, "dcp"), (3, 0, "dcp"), (2, 1, "dcp"), (2, 0, "zstd"), (3, 0, "safetensors"), (2, 1, "safetensors")]
        outputs = [folder / f"{form}-{ranks}-dim{dim}" for ranks, dim, form in ways]
        words = [word for output, way in zip(outputs, ways) for word in (output, *way)]
        # All in one process, since to load LibTorch takes longer than to save.
        done = subprocess.run(
            [str(word) for word in (self.resaver, self.source, *words)], capture_output=True, text=True, timeout=240, check=False
        )
        answers = [json.loads(line)["why"] for line in done.stdout.splitlines()]
        answers += [done.stderr[-600:] or f"status {done.returncode}"] * (len(ways) - len(answers))
        for output, (ranks, dim, form), why in zip(outputs, ways, answers):
            what = f"resave {output.name}"
            refusal = "has no such type"
            if form == "safetensors" and self.manifest["opaque"]:
                refusal = "safetensors cannot store this object"
            if refusal in why:
                is_clear = "unsupported" in why and not (output.exists() and list(output.iterdir()))
                self.note("resave", f"{what}: what has no place there is refused", "" if is_clear else why)
                continue
            self.note("resave", what, why)
            if why:
                continue
            self.expect("resave", 0, "verify", output)
            self.same("resave", self.source, output, excluded=changed)
            self.inspect(output, manifest)
            if form == "safetensors":
                if self.native_in_safetensors():
                    self.job("huggingface", output, manifest=str(manifest_path))
                continue
            self.job("dcp", output, manifest=str(manifest_path), compressed=form == "zstd")
            if form == "zstd":
                continue
            for kind in ("dtensor", "sharded-tensor"):
                self.job(kind, output, ranks=2, dim=dim, manifest=str(manifest_path))
            if self.manifest.get("flatten", True):
                self.job("dcp-to-torch", output, manifest=str(manifest_path))

    def reshard_like(self, folder, other):
        """Back to the layout of the source from that of another rank count."""
        back = folder / "like-source"
        if not self.expect("reshard", 0, "reshard", other, back, "--like", self.source):
            return
        self.expect("reshard", 0, "verify", back)
        self.same("reshard", self.source, back)
        found, expected = (self.boxes(path) for path in (back, self.source))
        different = [name for name in expected if found.get(name) != expected[name]]
        self.note("reshard", "boxes of --like", f"other boxes: {different[:5]}" if different else "")
        self.job("dcp", back)
        if self.manifest.get("flatten", True):
            self.job("dcp-to-torch", back)

    def boxes(self, path):
        done = subprocess.run([self.tessera, "inspect", path, "--json"], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return {}
        return {
            name: sorted((c["offsets"], c["sizes"]) for c in tensor["chunks"] if math.prod(c["sizes"]))
            for name, tensor in json.loads(done.stdout)["tensors"].items()
        }


def exclusions(names):
    return [word for name in names for word in ("--exclude", name, "--exclude", f"{name}.*")]


def compare_versions(tessera, work, versions, report):
    """What both PyTorchs saved is the same state, and so is what the command made of it."""
    old, new = (work / version for version in versions)
    for case in sorted(old.iterdir()):
        name = case.name
        if name in COMPUTED or not (new / name).exists():
            continue
        journey = Journey(tessera, case, report)
        journey.row = f"both {name}"
        if journey.kind == "refused":
            continue
        other = Journey(tessera, new / name, report)
        # New versions save more dtypes; opaque values are pickles, which differ between versions of Python.
        unlike = set(journey.manifest["tensors"]) ^ set(other.manifest["tensors"]) | set(journey.manifest["opaque"])
        journey.same("versions", journey.source, other.source, unlike)
        for output in ("out/one.safetensors", "out/ck.pt", "out/dcp", "reshard/3-dim0", "chain/4"):
            if (case / output).exists() and (new / name / output).exists():
                journey.same("versions", case / output, new / name / output, unlike)
        if name == "fsdp" and (new / "mesh2d").exists():
            journey.expect("versions", 1, "diff", journey.source, new / "mesh2d" / "ck")
