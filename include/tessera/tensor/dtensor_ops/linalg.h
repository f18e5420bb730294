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
/// LD and pivots of symmetric matrices, complex ones Hermitian if `hermitian`. They have no gradient.
Factors linalg_ldl_factor(const DTensor& a, bool hermitian = false);
struct PermutationAndTriangles {
  DTensor p, l, u;
};
PermutationAndTriangles linalg_lu(const DTensor& a);                          ///< p @ l @ u = a
PermutationAndTriangles lu_unpack(const DTensor& lu, const DTensor& pivots);  ///< of linalg_lu_factor
Factors linalg_slogdet(const DTensor& a);   ///< the determinant's sign and the logarithm of its absolute value
DTensor linalg_cholesky(const DTensor& a);  ///< lower
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
DTensor linalg_lu_solve(const DTensor& lu, const DTensor& pivots, const DTensor& b);
DTensor linalg_ldl_solve(const DTensor& ld, const DTensor& pivots, const DTensor& b, bool hermitian = false);

/// Returns the inverse of the matrices whose Cholesky factor is `factor`.
DTensor cholesky_inverse(const DTensor& factor, bool upper = false);

// Householder reflections: the columns of a [..., m, n] below the diagonal, with factors tau [..., k], are those of an
// orthogonal matrix Q.
/// Returns the reflections of a QR decomposition: a with R on and above the diagonal, and tau. They have no gradient.
Factors geqrf(const DTensor& a);
/// Returns the first n columns of Q.
DTensor linalg_householder_product(const DTensor& a, const DTensor& tau);
/// Returns Q @ c, or c @ Q if not `left`; Q is transposed if `transpose`. Keeps shards of the other dimension of c, and
/// is linear in c. LibTorch 1.13 has no gradient of it.
DTensor ormqr(const DTensor& a, const DTensor& tau, const DTensor& c, bool left = true, bool transpose = false);

/// Returns the cross product along `dim`, which has size 3.
DTensor linalg_cross(const DTensor& a, const DTensor& b, std::int64_t dim = -1);

// These are linear. `offset` is that of a diagonal: it has the elements [..., i, i + offset].

// Return x with 0 above the diagonal, or below it. They keep all shards.
DTensor tril(const DTensor& x, std::int64_t offset = 0);
DTensor triu(const DTensor& x, std::int64_t offset = 0);
/// Returns matrices that have x [..., n] on the diagonal, and 0 elsewhere. It unshards the last dimension.
DTensor diag_embed(const DTensor& x, std::int64_t offset = 0);

}  // namespace tessera::dtensor
