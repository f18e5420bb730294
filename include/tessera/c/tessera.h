#pragma once
/// \file
/// The C interface of tessera: functions that open, read, verify, compare, convert, reshard and save checkpoints of
/// PyTorch, without PyTorch, Python or LibTorch. Link libtessera.so. Other languages bind to this header.
///
///     tessera_checkpoint* checkpoint = NULL;
///     float bias[1024];
///     if (tessera_open("step-1000", NULL, &checkpoint) ||
///         tessera_read_tensor(checkpoint, "model.bias", bias, sizeof bias, NULL)) {
///       fprintf(stderr, "%s\n", tessera_last_error());
///     }
///     tessera_close(checkpoint);
///
/// Laws
///   Errors: a function that can fail returns a `tessera_status`. If that is not TESSERA_OK, tessera_last_error()
///   returns the reason, and outputs are unchanged unless the function's comment states otherwise. No exception leaves
///   the library.
///   Objects: a NULL in place of an object is refused with TESSERA_INVALID_ARGUMENT. Functions without a status accept
///   it: they return 0, "" or, for an element of a list, NULL, or do nothing.
///   Ownership: an object that a function creates is released by the function that its comment names, which accepts
///   NULL. Pointers into an object are valid until it is released. Memory that is passed to a function is used during
///   the call alone.
///   Threads: every function may be called from any thread. Several threads may use an object at once, but none while
///   it is released.
///   Text is UTF-8 with a zero byte at its end. Names are as the checkpoint has them, which may be invalid UTF-8.
///   Options: the first member is the structure's size, which tells the library which members the caller knows. A zero
///   or NULL in any other member is its default. NULL in place of options means all defaults.
///
///     tessera_open_options options = {.struct_size = sizeof options};

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/// The outcome of a call. The numbers do not change.
typedef enum tessera_status {
  TESSERA_OK = 0,
  TESSERA_INVALID_ARGUMENT = 1,  ///< invalid or inconsistent arguments
  TESSERA_CORRUPT = 2,           ///< bytes that contradict their format, their checksum or each other
  TESSERA_UNSUPPORTED = 3,       ///< well-formed input that this version does not handle
  TESSERA_NOT_FOUND = 4,         ///< a file, a tensor or an object that does not exist
  TESSERA_IO = 5,                ///< the operating system refused or failed
  TESSERA_RANK_FAILURE = 6,      ///< another rank failed or died
  TESSERA_CANCELLED = 7,         ///< stopped by tessera_task_cancel
  TESSERA_INTERNAL = 8           ///< a defect of this library, or no memory
} tessera_status;

/// Returns the version of the library: "0.1.0".
const char* tessera_version(void);
/// Returns the name of a status: "corrupt". Returns "unknown" for a number that is none.
const char* tessera_status_name(tessera_status status);
/// Returns the message of this thread's last failed call, one line, or "" if none has failed. Valid until the thread's
/// next failed call.
const char* tessera_last_error(void);

// --- bytes and text that the library creates

typedef struct tessera_bytes tessera_bytes;
/// Returns the bytes, followed by a zero byte.
const char* tessera_bytes_data(const tessera_bytes* bytes);
/// Returns the number of bytes, without the zero byte.
size_t tessera_bytes_size(const tessera_bytes* bytes);
/// Releases the bytes.
void tessera_bytes_free(tessera_bytes* bytes);

// --- progress and cancellation of long operations

/// An operation that other threads observe and cancel. Pass it to one call at a time, in the options.
typedef struct tessera_task tessera_task;
/// Creates a task. Release it with tessera_task_free.
tessera_status tessera_task_new(tessera_task** task);
/// Makes the operation return TESSERA_CANCELLED soon, and every later operation of this task at once. Safe in signal
/// handlers.
void tessera_task_cancel(tessera_task* task);
/// Sets `*done_bytes` and `*total_bytes` of the current phase of the operation; the total is 0 if it is unknown.
void tessera_task_progress(const tessera_task* task, uint64_t* done_bytes, uint64_t* total_bytes);
/// Releases the task.
void tessera_task_free(tessera_task* task);

// --- checkpoints

/// An open checkpoint of any supported format: a directory of PyTorch's distributed checkpoint (DCP) or of Meta's
/// torch_checkpointing, safetensors, or a torch.save file. Opening reads no tensors. Nothing in the checkpoint is
/// executed. The files must not change while it is open.
typedef struct tessera_checkpoint tessera_checkpoint;

typedef struct tessera_open_options {
  size_t struct_size;
  int no_checksums;  ///< whether to ignore the checkpoint's sidecar (.tessera.json)
} tessera_open_options;

/// Opens the checkpoint at `path`. Release it with tessera_close. Fails with TESSERA_INVALID_ARGUMENT for a file inside
/// a DCP directory, TESSERA_NOT_FOUND, TESSERA_UNSUPPORTED, TESSERA_CORRUPT, TESSERA_IO.
tessera_status tessera_open(const char* path, const tessera_open_options* options, tessera_checkpoint** checkpoint);
/// Closes the checkpoint and releases its memory.
void tessera_close(tessera_checkpoint* checkpoint);

/// Returns "dcp", "safetensors", "torch" or "torch_checkpointing".
const char* tessera_kind(const tessera_checkpoint* checkpoint);
/// Returns the version of the format as text for users: "PyTorch 2.x".
const char* tessera_format_version(const tessera_checkpoint* checkpoint);
/// Returns the number of warnings from opening, and one of them; NULL if there is no such warning.
size_t tessera_warning_count(const tessera_checkpoint* checkpoint);
const char* tessera_warning(const tessera_checkpoint* checkpoint, size_t warning);
/// Returns the number of files that hold data, and the name of one, relative to the checkpoint; NULL if there is no
/// such file.
size_t tessera_file_count(const tessera_checkpoint* checkpoint);
const char* tessera_file_name(const tessera_checkpoint* checkpoint, size_t file);
/// Returns the size of the largest block of the sidecar, which may have to be read to compare a small part of a file:
/// 128 KiB if tessera wrote it, and the size of the largest file if it is of version 1. Returns 0 without a sidecar.
uint64_t tessera_largest_block(const tessera_checkpoint* checkpoint);

/// A tensor of a checkpoint. The pointers are into the checkpoint.
typedef struct tessera_tensor_info {
  const char* name;
  size_t name_bytes;     ///< without the zero byte at the end
  const char* dtype;     ///< PyTorch's name without "torch.": "bfloat16"
  size_t element_bytes;  ///< size of an element
  size_t dims;           ///< number of dimensions
  const int64_t* shape;  ///< `dims` sizes
  uint64_t size_bytes;   ///< of all elements
  size_t chunks;         ///< number of stored chunks
  int requires_grad;
} tessera_tensor_info;

/// A stored chunk: a box of the tensor, and the bytes of a file that hold it. In a DCP checkpoint these are a
/// torch.save archive, in other formats the elements themselves. Offsets and sizes are at least 0. That a box is within
/// the tensor is checked by what reads it and by tessera_verify, not here: in damaged metadata, offset + size may be
/// more than the shape, and more than int64_t holds.
typedef struct tessera_chunk_info {
  const int64_t* offsets;  ///< `dims` numbers, as `sizes`
  const int64_t* sizes;
  size_t file;  ///< for tessera_file_name; SIZE_MAX if the location is not recorded
  uint64_t offset_bytes, length_bytes;
} tessera_chunk_info;

/// Returns the number of tensors, which are in the checkpoint's order.
size_t tessera_tensor_count(const tessera_checkpoint* checkpoint);
/// Describes tensor number `tensor`. Fails with TESSERA_INVALID_ARGUMENT if there is none.
tessera_status tessera_tensor(const tessera_checkpoint* checkpoint, size_t tensor, tessera_tensor_info* info);
/// Finds a tensor by name. Fails with TESSERA_NOT_FOUND.
tessera_status tessera_find_tensor(const tessera_checkpoint* checkpoint, const char* name, size_t* tensor);
/// Describes a chunk of a tensor. Fails with TESSERA_INVALID_ARGUMENT if there is none.
tessera_status tessera_chunk(const tessera_checkpoint* checkpoint, size_t tensor, size_t chunk,
                             tessera_chunk_info* info);

/// An object of a checkpoint: a value that is not a tensor. The pointer is into the checkpoint.
typedef struct tessera_object_info {
  const char* name;
  size_t name_bytes;  ///< without the zero byte at the end
} tessera_object_info;

/// Returns the number of objects.
size_t tessera_object_count(const tessera_checkpoint* checkpoint);
/// Describes object number `object`. Fails with TESSERA_INVALID_ARGUMENT if there is none.
tessera_status tessera_object(const tessera_checkpoint* checkpoint, size_t object, tessera_object_info* info);
/// Reads an object, and sets `*json` to {"type": TEXT, "repr": TEXT, "value": VALUE, "opaque": REASON}. `type` and
/// `repr` are Python's. `value` preserves the value as docs/formats/objects.md describes. An object with a part that
/// only Python could create has a null `value` and the reason in `opaque`, which others do not have. Release `*json`
/// with tessera_bytes_free. Fails with TESSERA_INVALID_ARGUMENT if there is no such object, TESSERA_CORRUPT,
/// TESSERA_IO.
tessera_status tessera_read_object(const tessera_checkpoint* checkpoint, size_t object, tessera_bytes** json);
/// Reads the torch.save archive of an object of a DCP checkpoint. Release `*archive` with tessera_bytes_free. Fails
/// with TESSERA_UNSUPPORTED if the checkpoint stores its objects otherwise, and as tessera_read_object.
tessera_status tessera_read_object_archive(const tessera_checkpoint* checkpoint, size_t object,
                                           tessera_bytes** archive);

// --- reading tensors

/// Boxes of tensors to read, and memory for them, in columns. Arrays of one number for each dimension have those of box
/// 0, then those of box 1, and so on; all others have `count` elements.
typedef struct tessera_boxes {
  size_t struct_size;
  size_t count;
  const char* const* names;   ///< of tensors; a name may occur several times
  const char* const* dtypes;  ///< of the memory; NULL, or NULL for a box: as stored
  const size_t* dims;         ///< number of dimensions of each box; NULL together with `offsets` and `sizes`
  const int64_t* offsets;     ///< in the tensor, `dims[i]` numbers for box i; NULL for full tensors
  const int64_t* sizes;       ///< likewise
  void* const* data;          ///< memory: element x of a box is at data + sum(x[d] * strides[d]) * element size
  const size_t* data_bytes;   ///< size of that memory
  const int64_t* strides;     ///< in elements, at least 0, `dims[i]` numbers for box i; NULL for row-major
  const int64_t* shapes;      ///< of the full tensors, likewise: a tensor of another shape is an error; NULL for any
} tessera_boxes;

typedef struct tessera_read_options {
  size_t struct_size;
  int cast;            ///< whether floating-point elements are cast to the dtype of the memory; otherwise it must fit
  int no_checksums;    ///< whether to skip the checksums that the format itself has
  size_t threads;      ///< 0: one per processor, at least 4
  tessera_task* task;  ///< may be NULL
  int compare_rest;    ///< whether to read and compare the blocks that `bytes_not_compared` would count
} tessera_read_options;

/// What a read did.
typedef struct tessera_read_report {
  uint64_t read_bytes;          ///< from files, including gaps between requested elements
  uint64_t bytes_not_compared;  ///< in blocks of the sidecar of which reads so far needed only scattered parts
} tessera_read_report;

/// Reads the elements of `boxes`, and other bytes only where a comparison with checksums needs them. `report` may be
/// NULL. Fails with TESSERA_INVALID_ARGUMENT if a box is not inside its tensor, a shape or dtype differs, or memory is
/// too small; TESSERA_NOT_FOUND for a name that the checkpoint does not have; TESSERA_CORRUPT, naming file, offset and
/// tensor; TESSERA_IO; TESSERA_CANCELLED. The memory may then be partly filled, unless an argument was invalid.
tessera_status tessera_read(const tessera_checkpoint* checkpoint, const tessera_boxes* boxes,
                            const tessera_read_options* options, tessera_read_report* report);
/// Reads all elements of one tensor in row-major order. `data_bytes` must be the tensor's size. All that is read is
/// compared with the sidecar, whatever `compare_rest` is (see tessera_largest_block). Fails as tessera_read.
tessera_status tessera_read_tensor(const tessera_checkpoint* checkpoint, const char* name, void* data,
                                   size_t data_bytes, const tessera_read_options* options);

// --- saving

/// A function that copies `size_bytes` of the elements of a row of a state, in row-major order from byte `begin_bytes`
/// on, to `out`. tessera_save_write calls it for rows whose `data` is NULL, from several threads at once, each time for
/// a part of a row that begins and ends between elements. Returns 0. If it returns another number, the save fails.
typedef int (*tessera_read_elements)(void* context, size_t row, uint64_t begin_bytes, size_t size_bytes, void* out);

/// The part of a state that a rank has, in columns: chunks of tensors, and objects. Arrays of one number for each
/// dimension have those of row 0, then those of row 1, and so on; all others have `count` elements.
typedef struct tessera_state {
  size_t struct_size;
  size_t count;
  const char* const* names;   ///< of tensors and objects; a tensor of several chunks has several rows
  const char* const* paths;   ///< in the nested state dict, JSON arrays of texts and integers; NULL, or NULL: the name
  const char* const* dtypes;  ///< PyTorch's names; NULL for an object
  const size_t* dims;         ///< numbers of dimensions; 0 for an object
  const int64_t* shapes;      ///< of the full tensors, `dims[i]` numbers for row i
  const int64_t* offsets;     ///< of the chunks, likewise
  const int64_t* sizes;       ///< likewise
  const void* const* data;    ///< elements of the chunk, as for tessera_boxes; of an object: tessera_save_set_object
  const size_t* data_bytes;   ///< size of that memory
  const int64_t* strides;     ///< in elements, at least 0; NULL for row-major
  const int* requires_grad;   ///< of the tensors; NULL for none
  /// Reads elements that are not in the memory of the host, such as those on a GPU. NULL if all are in it.
  tessera_read_elements read;
  void* context;  ///< of `read`
} tessera_state;

typedef struct tessera_save_options {
  size_t struct_size;
  size_t files_per_rank;  ///< files of this rank, about equal in size; 0 for one
  size_t threads;         ///< that read elements and write files; 0 for one for each processor
  int keep;               ///< whether a checkpoint that is there is kept: the save then fails. Otherwise it is replaced
  const char* save_id;    ///< of the coordinator: a name that readers find in the metadata; NULL for none
  tessera_task* task;     ///< may be NULL
} tessera_save_options;

/// One rank's part in a save of a state that is distributed over ranks. The caller carries bytes between the ranks:
///
///   every rank     tessera_save_new, tessera_save_plan                   its plan goes to one rank, the coordinator
///   coordinator    tessera_save_answer                                   each rank gets its answer
///   every rank     tessera_save_objects, tessera_save_set_object for each, tessera_save_write
///                                                                        its report goes to the coordinator
///   coordinator    tessera_save_commit
///
/// The checkpoint is visible from the commit on, and the one that it replaces is complete until then. If a step before
/// the commit fails on any rank, or the commit fails without setting `*outcome_unknown`, every rank calls
/// tessera_save_abandon. A rank that does not know whether there was a commit, as when the coordinator died, must not:
/// its files may belong to the checkpoint. The next save removes them if they do not.
///
/// A rank takes these steps one after another. Meanwhile several threads may pass objects of different rows, and any
/// thread may call tessera_save_written_bytes.
typedef struct tessera_save tessera_save;
/// Begins a save of `state` to the directory `path`, which is created. The memory that the state's columns point to,
/// `data`, and what `read` reads must stay as they are until tessera_save_write returns. Release the save with
/// tessera_save_free. Fails with TESSERA_INVALID_ARGUMENT for a chunk that is not inside its shape, memory that is too
/// small, and the like.
tessera_status tessera_save_new(const char* path, const tessera_state* state, const tessera_save_options* options,
                                tessera_save** save);
/// Sets `*plan` to what the coordinator needs. Release it with tessera_bytes_free. Fails with TESSERA_IO.
tessera_status tessera_save_plan(tessera_save* save, tessera_bytes** plan);
/// Merges the plans of all ranks, `plans[r]` with `plan_bytes[r]` bytes, and sets `answers[r]` to what rank r needs.
/// Release each with tessera_bytes_free. Fails with TESSERA_INVALID_ARGUMENT if the ranks' states do not fit together
/// or there is a checkpoint that is kept.
tessera_status tessera_save_answer(tessera_save* save, size_t ranks, const void* const* plans, const size_t* plan_bytes,
                                   tessera_bytes** answers);
/// Sets `rows` to the rows of the state that are objects and that this rank must write, and `*count` to their number.
/// `rows` must have room for all objects of the state.
tessera_status tessera_save_objects(tessera_save* save, const void* answer, size_t answer_bytes, size_t* rows,
                                    size_t* count);
/// Passes an object as a torch.save archive, which is copied.
tessera_status tessera_save_set_object(tessera_save* save, size_t row, const void* archive, size_t archive_bytes);
/// Writes the files of this rank, makes them durable and sets `*report` to what the coordinator needs. Release it with
/// tessera_bytes_free. Fails with TESSERA_INVALID_ARGUMENT if an object was not passed; TESSERA_IO; TESSERA_CANCELLED.
tessera_status tessera_save_write(tessera_save* save, const void* answer, size_t answer_bytes, tessera_bytes** report);
/// Commits the checkpoint and removes the files of the previous one. If it fails, the previous one is unchanged, unless
/// it sets `*outcome_unknown` to 1: then either of the two is there. `outcome_unknown` may be NULL. Fails with
/// TESSERA_IO.
tessera_status tessera_save_commit(tessera_save* save, size_t ranks, const void* const* reports,
                                   const size_t* report_bytes, int* outcome_unknown);
/// Removes the files that this rank wrote. Has no effect on the coordinator after a commit.
void tessera_save_abandon(tessera_save* save);
/// Returns the size of the files that this rank wrote; 0 until tessera_save_write has succeeded.
uint64_t tessera_save_written_bytes(const tessera_save* save);
/// Releases the save.
void tessera_save_free(tessera_save* save);

// --- operations on checkpoints

typedef struct tessera_verify_options {
  size_t struct_size;
  size_t jobs;         ///< threads; 0: one per processor, at least 4, at most 16
  tessera_task* task;  ///< may be NULL
} tessera_verify_options;

/// Verifies every byte of the checkpoint at `path`. Sets `*problems` to the number of problems, and `*json`, unless
/// `json` is NULL, to the report that `tessera verify --json` prints; release it with tessera_bytes_free. Damage is
/// reported and is not a failure. Fails with TESSERA_NOT_FOUND, TESSERA_UNSUPPORTED, TESSERA_IO, TESSERA_CANCELLED.
tessera_status tessera_verify(const char* path, const tessera_verify_options* options, uint64_t* problems,
                              tessera_bytes** json);

/// A choice of tensors and objects by name: those that match any glob of `select`, or all if that is NULL, and none of
/// `exclude`. Both are arrays with a NULL at the end. A function fails with TESSERA_INVALID_ARGUMENT if `select` is
/// empty, if one of its globs matches no name, or if nothing is selected.
typedef struct tessera_selection {
  const char* const* select;
  const char* const* exclude;
} tessera_selection;

typedef struct tessera_diff_options {
  size_t struct_size;
  tessera_selection selection;
  int expand;          ///< as in tessera_convert_options
  size_t jobs;         ///< threads; 0: one per processor, at least 4, at most 16
  tessera_task* task;  ///< may be NULL
} tessera_diff_options;

/// Compares the states of two checkpoints, whatever their formats and layouts. Sets `*differences` to the number of
/// differences, and `*json`, unless `json` is NULL, to the report that `tessera diff --json` prints; release it with
/// tessera_bytes_free. Fails with TESSERA_INVALID_ARGUMENT as tessera_selection describes, TESSERA_UNSUPPORTED unless
/// `expand` for tensors that repeat few stored elements, TESSERA_CORRUPT, TESSERA_IO, TESSERA_CANCELLED.
tessera_status tessera_diff(const tessera_checkpoint* a, const tessera_checkpoint* b,
                            const tessera_diff_options* options, uint64_t* differences, tessera_bytes** json);

typedef struct tessera_convert_options {
  size_t struct_size;
  tessera_selection selection;
  const char* dtype;         ///< floating-point tensors are cast to this; NULL: as stored
  uint64_t max_shard_bytes;  ///< largest file, not counting headers; 0 for the format's default
  int dry_run;               ///< whether to report and write nothing
  int expand;                ///< whether tensors that repeat few stored elements may take many times their size
  size_t jobs;               ///< threads; 0: one per processor, at least 4, at most 16
  tessera_task* task;        ///< may be NULL
} tessera_convert_options;

/// Writes `source` at `destination`, which must not exist, in `format`: "dcp", "safetensors", "torch" or
/// "torch_checkpointing". The destination appears complete or not at all. Sets `*json`, unless `json` is NULL, to a
/// report as by `tessera convert --json`; release it with tessera_bytes_free. Fails with TESSERA_INVALID_ARGUMENT,
/// TESSERA_NOT_FOUND, TESSERA_UNSUPPORTED, TESSERA_CORRUPT, TESSERA_IO, TESSERA_CANCELLED.
tessera_status tessera_convert(const tessera_checkpoint* source, const char* destination, const char* format,
                               const tessera_convert_options* options, tessera_bytes** json);

/// Writes `source` as a DCP checkpoint of `ranks` ranks at `destination`. Each tensor is sharded in dimension `dim`,
/// negative from the last. If `like` is not NULL, ranks and boxes are those of that checkpoint, and `ranks` and `dim`
/// are ignored. Otherwise as tessera_convert.
tessera_status tessera_reshard(const tessera_checkpoint* source, const char* destination, int64_t ranks, int64_t dim,
                               const tessera_checkpoint* like, const tessera_convert_options* options,
                               tessera_bytes** json);

#ifdef __cplusplus
}
#endif
