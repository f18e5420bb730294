# All that one does with this tree. Every target brings what it needs, so on a fresh Debian 12 each works as it stands.
#   make             the command, build/bin/tessera      make demo      a training that is killed and goes on
#   make test        all tests                           make interop   against real PyTorch 2.6 and 2.14 (root)
#   make check       format, lint, rules, two compilers  make bench     the speed table; ONLY=row,row for a part
#   make libtorch    all tests on LibTorch 2.6 and 2.14 (root)
#   make asan, tsan  all tests under sanitizers          make fuzz      FUZZ_SECONDS=600 for each target
#   make install     PREFIX, DESTDIR; TORCH=no            make clean     and distclean: the PyTorch folders too
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := all
.PHONY: all test demo interop libtorch check bench asan tsan fuzz install clean distclean

JOBS ?= $(shell nproc)
PREFIX ?= /usr/local
FUZZ_SECONDS ?= 600
ONLY ?=
# Of tools/check, all if none is named.
CHECKS ?=
TORCH ?= yes
# `make SETUP=no` installs nothing: everything is there.
SETUP ?= yes
setup = $(if $(filter no,$(SETUP)),true,tools/setup $(1))
# clang 14's sanitizers can't place their shadow where the kernel spreads mappings widely.
fixed_addresses = $(shell setarch -R true 2>/dev/null && echo setarch -R)

all:
	$(call setup,build)
	[[ -e build/build.ninja ]] || cmake --preset torch-free -B build
	cmake --build --preset release --parallel $(JOBS) --target tessera

test:
	$(call setup,build torch test browser bench)
	cmake --preset release -DTESSERA_TESTS=ON
	cmake --build --preset release --parallel $(JOBS)
	ctest --preset release --parallel 2

# A build folder that has tests keeps them.
demo:
	$(call setup,build torch)
	cmake --preset release -DTESSERA_EXAMPLES=ON $(if $(wildcard build/CMakeCache.txt),,-DTESSERA_TESTS=OFF -DTESSERA_BENCH=OFF)
	cmake --build --preset release --parallel $(JOBS) --target tessera train_gpt
	examples/demo build/bin

interop:
	$(call setup,build torch test)
	[[ $$EUID -ne 0 ]] || $(call setup,interop)
	cmake --preset release -DTESSERA_TESTS=ON
	cmake --build --preset release --parallel $(JOBS) --target tessera sharded_values dtensor_values flat_param_layout_test state_values resave train_checkpoint train_fsdp
	tools/with-pytorch -- tests/interop/run

libtorch:
	[[ $$EUID -ne 0 ]] || $(call setup,interop)
	JOBS=$(JOBS) tools/test-libtorch 2.6 2.14

check:
	$(call setup,build torch test bench check)
	JOBS=$(JOBS) tools/check $(CHECKS)

bench:
	$(call setup,build torch bench interop)
	cmake --preset release -DTESSERA_BENCH=ON
	cmake --build --preset release --parallel $(JOBS)
	tools/with-pytorch -- bench/run $(ONLY)

asan tsan:
	$(call setup,build torch test browser check)
	cmake --preset $@
	cmake --build --preset $@ --parallel $(JOBS)
	$(fixed_addresses) ctest --preset $@ --parallel 2

fuzz:
	$(call setup,build fuzz)
	cmake --preset fuzz
	cmake --build --preset fuzz --parallel $(JOBS)
	tools/fuzz $(FUZZ_SECONDS)

# In a build of its own, which has what is installed and nothing else.
install:
	$(call setup,build $(if $(filter no,$(TORCH)),,torch))
	cmake --preset $(if $(filter no,$(TORCH)),torch-free,release) -B build-install -DTESSERA_TESTS=OFF -DTESSERA_BENCH=OFF
	cmake --build build-install --parallel $(JOBS)
	cmake --install build-install --prefix $(PREFIX)

# The PyTorch folders, which take minutes and root to make, stay.
clean:
	[[ ! -d build ]] || find build -mindepth 1 -maxdepth 1 ! -name pytorch -exec rm -rf {} +
	rm -rf build-*

# Mounts first: what is mounted in those folders is not ours to delete.
distclean: clean
	[[ ! -d build/pytorch ]] || tools/pytorch-root --unmount build/pytorch/*/
	rm -rf --one-file-system build
