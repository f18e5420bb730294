// How a program begins, as glibc.cpp: with glibc 2.28 and later, although it is linked on a newer system.
//
// Up to glibc 2.33 a program passes a function that calls its constructors to __libc_start_main. From 2.34 on it passes
// none, and a new version of __libc_start_main calls them by itself.

#include "first_version.h"

#pragma GCC visibility push(hidden)

extern "C" {

using Main = int(int, char**, char**);
using Constructor = void(int, char**, char**);

// Of the linker: the program's constructors.
extern Constructor* __init_array_start[];
extern Constructor* __init_array_end[];

static int construct(int count, char** arguments, char** environment) {
  for (Constructor** each = __init_array_start; each != __init_array_end; ++each) {
    (*each)(count, arguments, environment);
  }
  return 0;
}

int first_start(Main* main, int count, char** arguments, Main* construct, void (*destroy)(), void (*finish)(),
                void* stack_end) __attribute__((visibility("default")));
__asm__(".symver first_start,__libc_start_main@" FIRST_VERSION);

int __libc_start_main(Main* main, int count, char** arguments, Main* /*construct*/, void (*destroy)(), void (*finish)(),
                      void* stack_end) {
  return first_start(main, count, arguments, construct, destroy, finish, stack_end);
}

}  // extern "C"
