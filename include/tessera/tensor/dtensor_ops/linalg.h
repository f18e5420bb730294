#pragma once
/// \file
/// Linear algebra on DTensors, of matrices in the last two dimensions. Functions without the prefix `linalg_` have the
/// names of ATen's, too. Included by tessera/tensor/dtensor_ops.h.

#include <cstdint>

#include "tessera/tensor/dtensor.h"

namespace tessera::dtensor {

// The other dimensions are broadcast to each other and keep their shards; the op unshards those of the matrices.

struct Svd {
  DTensor u, s, vh;
};
Svd linalg_svd(const DTensor& a, bool full_matrices = true);
struct Factors {
  DTensor first, second;
};
/// Returns eigenvalues and eigenvectors of symmetric matrices; `lower` selects the triangle that is read.
Factors linalg_eigh(const DTensor& a, bool lower = true);
Factors linalg_eig(const DTensor& a);        ///< complex eigenvalues and eigenvectors
Factors linalg_qr(const DTensor& a);         ///< Q and R, reduced
Factors linalg_lu_factor(const DTensor& a);  ///< LU and pivots
Factors linalg_slogdet(const DTensor& a);    ///< the determinant's sign and the logarithm of its absolute value
DTensor linalg_cholesky(const DTensor& a);   ///< lower
DTensor linalg_inv(const DTensor& a);
DTensor linalg_pinv(const DTensor& a);
DTensor linalg_det(const DTensor& a);
DTensor linalg_matrix_exp(const DTensor& a);
DTensor linalg_matrix_power(const DTensor& a, std::int64_t n);
// Return x with a @ x = b, for b [..., n, columns]. They keep shards of the columns, and are linear in b.
DTensor linalg_solve(const DTensor& a, const DTensor& b);
/// Reads one triangle of a, the upper one if `upper`.
DTensor linalg_solve_triangular(const DTensor& a, const DTensor& b, bool upper);
/// For the a whose Cholesky factor is `factor`: factor @ factor^T, or factor^T @ factor if `upper`.
DTensor cholesky_solve(const DTensor& b, const DTensor& factor, bool upper = false);
/// Returns the cross product along `dim`, which has size 3.
DTensor linalg_cross(const DTensor& a, const DTensor& b, std::int64_t dim = -1);

// These are linear. `offset` is that of a diagonal: it has the elements [..., i, i + offset].

// Return x with 0 above the diagonal, or below it. They keep all shards.
DTensor tril(const DTensor& x, std::int64_t offset = 0);
DTensor triu(const DTensor& x, std::int64_t offset = 0);
/// Returns matrices that have x [..., n] on the diagonal, and 0 elsewhere. It unshards the last dimension.
DTensor diag_embed(const DTensor& x, std::int64_t offset = 0);

}  // namespace tessera::dtensor
