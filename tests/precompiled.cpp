// CMake compiles headers beforehand for a target that has a source.
