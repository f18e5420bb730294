# A module of a project that uses tessera: it finds Zstandard, and makes variables in place of targets.
set(Zstd_FOUND TRUE)
