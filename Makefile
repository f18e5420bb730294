# The tasks of this tree. Every target installs what it needs, so each works on a fresh Debian 12.
#   make             the command, build/bin/tessera      make demo      a training that is killed and resumed
#   make test        all tests                           make interop   against real PyTorch 2.6 and 2.14 (root)
#   make check       format, rules, two compilers, lint  make bench     the speed table; ONLY=row,row for a part
#   make chaos       the campaigns of docs/campaigns.md, 20 times as long; CHAOS=N
#   make libtorch    all tests on LibTorch 2.6 and 2.14 (root)
#   make accelerator tests on a simulated accelerator, LibTorch 2.6 (root)
#   make cuda        builds with CUDA and NCCL, and runs all tests that need no GPU (root)
#   make mutation    removes each wait for a device in turn and expects a test to fail (root)
#   make asan, tsan  all tests under sanitizers          make fuzz      FUZZ_SECONDS=600 for each target
#   make install     PREFIX, DESTDIR; TORCH=no SHARED=yes  make uninstall  what make install installed last
#   make deb         Debian packages, in build-deb        make wheel     the wheel of the Python package, in dist
#   make shared      tests an install of shared libraries
#   make clean       and distclean: the PyTorch folders too
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := all
# Each goal is parallel in itself, and ninja does not lock its folder.
.NOTPARALLEL:
# Scripts sort and compare names, and read numbers with a decimal point.
export LC_ALL := C.UTF-8
.PHONY: all test demo interop chaos libtorch accelerator cuda mutation check bench asan tsan fuzz install uninstall shared deb wheel clean distclean

JOBS ?= $(shell nproc)
# Test programs wait for disks, other ranks and deadlines more than half of the time, sanitized ones less.
TESTS_AT_ONCE ?= $(shell expr $$(nproc) + $(if $(filter asan tsan,$(MAKECMDGOALS)),2,4))
PREFIX ?= /usr/local
DESTDIR ?=
FUZZ_SECONDS ?= 600
CHAOS ?= 20
ONLY ?=
# Of tools/check, all if none is named.
CHECKS ?=
TORCH ?= yes
SHARED ?= no
# `make SETUP=no` installs nothing: everything is there.
SETUP ?= yes
setup = $(if $(filter no,$(SETUP)),true,tools/setup $(1))
# Ranks that share processors: a thread that a message wakes does not preempt the sender, which would hold the lock that
# Gloo's thread then spins for. Takes a quarter of the processor time off the tests.
batch = chrt --batch 0
# clang 14's sanitizers can't place their shadow where the kernel spreads mappings widely.
fixed_addresses = $(shell setarch -R true 2>/dev/null && echo setarch -R)

all:
	$(call setup,build)
	[[ -e build/build.ninja ]] || cmake --preset torch-free -B build
	cmake --build --preset release --parallel $(JOBS) --target tessera

test:
	$(call setup,build torch test browser)
	cmake --preset release -DTESSERA_TESTS=ON
	cmake --build --preset release --parallel $(JOBS)
	rm -f build/test-times.txt
	$(batch) ctest --preset release --parallel $(TESTS_AT_ONCE)

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
	cmake --build --preset release --parallel $(JOBS) --target tessera tessera_c_shared sharded_values dtensor_values layout_test state_values resave train_checkpoint train_fsdp dtensor_transformer
	tools/with-pytorch -- tests/interop/run

chaos:
	$(call setup,build torch test)
	cmake --preset release -DTESSERA_TESTS=ON
	cmake --build --preset release --parallel $(JOBS) --target checkpoint_test comm_test fsdp_test tessera train_gpt reshard_on_hosts collectives_on_hosts
	TESSERA_CHAOS=$(CHAOS) build/bin/checkpoint_test --gtest_filter='Save*:*FlippedBit*:ConvertTest.OfMany*:*DamagedMetadata*'
	build/bin/comm_test --gtest_filter='*OneSided*:Rendezvous*:*DyingRank*:*DeadRank*'
	TESSERA_CHAOS=$(CHAOS) build/bin/fsdp_test --gtest_filter='KillsTest.*'
	ctest --test-dir build --output-on-failure --parallel 3 -R '^hosts_' --repeat until-fail:$(CHAOS)

libtorch:
	[[ $$EUID -ne 0 ]] || $(call setup,interop)
	JOBS=$(JOBS) tools/test-libtorch 2.6 2.14

accelerator:
	[[ $$EUID -ne 0 ]] || $(call setup,interop)
	JOBS=$(JOBS) TARGETS=accelerator_test tools/test-libtorch 2.6 -- -R accelerator_test

cuda:
	[[ $$EUID -ne 0 ]] || $(call setup,interop)
	JOBS=$(JOBS) tools/test-libtorch 2.6-cuda

mutation:
	[[ $$EUID -ne 0 ]] || $(call setup,interop)
	tests/accelerator/mutate

check:
	$(call setup,build torch test bench check)
	JOBS=$(JOBS) tools/check $(CHECKS)

bench:
	$(call setup,build torch bench interop)
	cmake --preset release -DTESSERA_BENCH=ON
	cmake --build --preset release --parallel $(JOBS) --target tessera tessera_c_shared bench_programs
	JOBS=$(JOBS) tools/with-pytorch -- bench/run $(ONLY)

asan tsan:
	$(call setup,build torch test browser check)
	cmake --preset $@
	cmake --build --preset $@ --parallel $(JOBS)
	rm -f build-$@/test-times.txt
	$(batch) $(fixed_addresses) ctest --preset $@ --parallel $(TESTS_AT_ONCE)

fuzz:
	$(call setup,build fuzz)
	cmake --preset fuzz
	cmake --build --preset fuzz --parallel $(JOBS)
	tools/fuzz $(FUZZ_SECONDS)

# In a build of its own, which has what is installed and nothing else.
install:
	$(call setup,build $(if $(filter no,$(TORCH)),,torch))
	cmake --preset $(if $(filter no,$(TORCH)),torch-free,release) -B build-install -DCMAKE_INSTALL_PREFIX="$(PREFIX)" \
	  -DTESSERA_SHARED=$(if $(filter no,$(SHARED)),OFF,ON) -DTESSERA_TESTS=OFF -DTESSERA_BENCH=OFF -DTESSERA_WERROR=OFF
	cmake --build build-install --parallel $(JOBS)
	DESTDIR="$(DESTDIR)" cmake --install build-install
	awk -v destdir="$(DESTDIR)" '{ print destdir $$0 }' build-install/install_manifest.txt >build-install/installed.txt

# The files that make install listed, with their DESTDIR, and the folders named tessera and below that this leaves empty.
uninstall:
	[[ -e build-install/installed.txt ]] || { echo "uninstall: no build-install/installed.txt, which make install writes" >&2; exit 1; }
	tr '\n' '\0' <build-install/installed.txt | xargs -0 rm -f
	while read -r path; do \
	  while path=$${path%/*} && [[ $$path/ == */tessera/* ]]; do echo "$$path"; done; \
	done <build-install/installed.txt | sort -ru | \
	  while read -r folder; do [[ ! -d $$folder ]] || rmdir --ignore-fail-on-non-empty "$$folder"; done

shared:
	$(call setup,build test)
	cmake --preset torch-free -B build-shared -DTESSERA_SHARED=ON
	cmake --build build-shared --parallel $(JOBS)
	tests/install/run build-shared $(CXX) OFF

deb:
	$(call setup,build torch deb)
	JOBS=$(JOBS) packaging/build

wheel:
	$(call setup,build test)
	JOBS=$(JOBS) packaging/wheel/build

# The PyTorch folders, which take minutes and root to make, stay.
clean:
	[[ ! -d build ]] || find build -mindepth 1 -maxdepth 1 ! -name pytorch -exec rm -rf {} +
	rm -rf build-* dist

# Mounts first: what is mounted in those folders is not ours to delete.
distclean: clean
	[[ ! -d build/pytorch ]] || tools/pytorch-root --unmount build/pytorch/*/
	rm -rf --one-file-system build
