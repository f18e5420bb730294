"""What PyTorch's ZStandard extension needs of the package zstandard, by the module that Python has since 3.14."""

from compression.zstd import ZstdFile


class Reader(ZstdFile):
    def seekable(self):
        return False  # as that of the package


class ZstdCompressor:
    def stream_writer(self, output):
        return ZstdFile(output, "wb")


class ZstdDecompressor:
    def stream_reader(self, stream):
        return Reader(stream, "rb")
