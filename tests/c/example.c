/* Prints a checkpoint's tensors. Compiled as C, to keep the header in that language. */
#include <stdio.h>

#include "tessera/c/tessera.h"

int main(int argc, char** argv) {
  tessera_checkpoint* checkpoint = NULL;
  tessera_open_options options = {.struct_size = sizeof options};
  size_t i;
  if (argc != 2) return 2;
  if (tessera_open(argv[1], &options, &checkpoint)) {
    fprintf(stderr, "%s\n", tessera_last_error());
    return 1;
  }
  for (i = 0; i < tessera_tensor_count(checkpoint); ++i) {
    tessera_tensor_info info;
    if (tessera_tensor(checkpoint, i, &info)) break;
    printf("%s %s\n", info.name, info.dtype);
  }
  tessera_close(checkpoint);
  return 0;
}
