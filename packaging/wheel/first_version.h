#pragma once
// The version of glibc's first symbols for a processor.

#if defined(__x86_64__)
#define FIRST_VERSION "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define FIRST_VERSION "GLIBC_2.17"
#else
#error "the wheel is built for x86_64 and aarch64"
#endif
