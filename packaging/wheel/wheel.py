"""Writes wheels: the binary distribution format of Python packages, by its specification on packaging.python.org. The same
contents give the same bytes."""

import base64
import csv
import hashlib
import io
import pathlib
import stat
import zipfile


def _line(name, value):
    if "\n" in value:
        raise ValueError(f"the field {name} is {value!r}, expected one line")
    return f"{name}: {value}\n"


class Wheel:
    """A wheel of the distribution `name` in `folder` for the platforms of `tag`, for example py3-none-manylinux_2_28_x86_64.

    `add` its files, then `finish` it. The file has its name when it is complete.
    """

    def __init__(self, folder, name, version, tag):
        self.path = pathlib.Path(folder) / f"{name}-{version}-{tag}.whl"
        self._partial = self.path.with_suffix(".partial")
        self._prefix = f"{name}-{version}"
        self._name, self._version, self._tag = name, version, tag
        self._files = {}
        self._licences = []

    def add(self, name, data, *, executable=False):
        """Adds a file, of which `name` is relative to the folder of packages."""
        parts = pathlib.PurePosixPath(name).parts
        if not parts or name != "/".join(parts) or ".." in parts or name.startswith("/"):
            raise ValueError(f"add '{name}' to a wheel: expected a relative path without '..'")
        if name in self._files:
            raise ValueError(f"add '{name}' to a wheel: it is there already")
        self._files[name] = (data, executable)

    def add_script(self, name, data):
        """Adds a file that is installed into the folder of commands. `#!python` at its begin becomes the Python of the installation."""
        self.add(f"{self._prefix}.data/scripts/{name}", data, executable=True)

    def add_licence(self, name, data):
        self._licences.append(name)
        self.add(f"{self._prefix}.dist-info/licenses/{name}", data)

    def finish(self, *, metadata, description):
        """Writes the file. `metadata` is a list of fields and their values, without those that all wheels have."""
        fields = [("Metadata-Version", "2.4"), ("Name", self._name), ("Version", self._version), *metadata]
        fields += [("License-File", name) for name in self._licences]
        text = "".join(_line(*field) for field in fields) + "\n" + description
        self.add(f"{self._prefix}.dist-info/METADATA", text.encode())
        wheel = [("Wheel-Version", "1.0"), ("Generator", "tessera packaging/wheel"), ("Root-Is-Purelib", "false")]
        self.add(f"{self._prefix}.dist-info/WHEEL", "".join(_line(*field) for field in [*wheel, ("Tag", self._tag)]).encode())
        self.add(f"{self._prefix}.dist-info/RECORD", self._record())
        try:
            with zipfile.ZipFile(self._partial, "w") as archive:
                for name, (data, executable) in self._files.items():
                    info = zipfile.ZipInfo(name)  # of 1980, whenever it is built
                    info.compress_type, info.create_system = zipfile.ZIP_DEFLATED, 3
                    info.external_attr = (stat.S_IFREG | (0o755 if executable else 0o644)) << 16
                    archive.writestr(info, data, compresslevel=9)
            self._partial.rename(self.path)
        finally:
            self._partial.unlink(missing_ok=True)

    def _record(self):
        """Name, digest and size of each file, but of this one."""
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        for name, (data, _) in self._files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.writerow((name, f"sha256={digest}", len(data)))
        rows.writerow((f"{self._prefix}.dist-info/RECORD", "", ""))
        return text.getvalue().encode()


def unpack(path, folder):
    """Unpacks a wheel as installers do: packages into `folder`/lib, commands into `folder`/bin, with `python3` of the environment to
    run them. Compares digests and sizes with RECORD."""
    folder = pathlib.Path(folder)
    with zipfile.ZipFile(path) as archive:
        name, version = path.name.split("-")[:2]
        record = f"{name}-{version}.dist-info/RECORD"
        rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(archive.read(record).decode()))}
        if set(rows) != set(archive.namelist()):
            raise ValueError(f"{path}: RECORD and the archive differ in {sorted(set(rows) ^ set(archive.namelist()))}")
        for info in archive.infolist():
            data = archive.read(info)
            digest, size = rows[info.filename]
            found = "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            if info.filename != record and (digest, int(size)) != (found, len(data)):
                raise ValueError(f"{path}: {info.filename} is not as RECORD has it")
            scripts = f"{name}-{version}.data/scripts/"
            if info.filename.startswith(scripts):
                target = folder / "bin" / info.filename.removeprefix(scripts)
                data = data.replace(b"#!python\n", b"#!/usr/bin/env python3\n", 1)
            else:
                target = folder / "lib" / info.filename
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            target.chmod(info.external_attr >> 16 & 0o777)
