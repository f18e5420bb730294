"""Writes zips that tools other than PyTorch made of an archive of this folder: python3 generate_zips.py FOLDER"""

import io
import pathlib
import sys
import zipfile


class Pipe(io.RawIOBase):
    """Can't seek, as a pipe can't, so that sizes go into data descriptors."""

    def __init__(self):
        super().__init__()
        self.bytes = bytearray()

    def writable(self):
        return True

    def write(self, data):
        self.bytes += data
        return len(data)


def copy(source, target, method=zipfile.ZIP_STORED, force_zip64=False, comment=b""):
    with zipfile.ZipFile(target, "w", method) as out, zipfile.ZipFile(source) as archive:
        for name in archive.namelist():
            info = zipfile.ZipInfo(name, (2024, 2, 29, 12, 30, 58))
            info.compress_type = method
            with out.open(info, "w", force_zip64=force_zip64) as entry:
                entry.write(archive.read(name))
        out.comment = comment


def main():
    folder = pathlib.Path(sys.argv[1])
    source = folder / "2.6-tensor.pt"
    copy(source, folder / "python-stored.zip")
    copy(source, folder / "python-zip64.zip", force_zip64=True, comment=b"made by a test")
    copy(source, folder / "python-deflated.zip", zipfile.ZIP_DEFLATED)
    for name, force_zip64 in (("python-piped.zip", False), ("python-piped-zip64.zip", True)):
        pipe = Pipe()
        copy(source, pipe, force_zip64=force_zip64)
        (folder / name).write_bytes(pipe.bytes)


if __name__ == "__main__":
    main()
