// Cosines and sines of rotary positions (Su et al. 2021).
#pragma once

namespace quire {

// Write out [num_positions, 2 * num_pairs]: the cosines of each position, then its sines, times `scale`, each computed in
// double and rounded once. frequencies [num_pairs]: radians per position. All threads take part.
void rotary_table(const double* frequencies, long num_pairs, long num_positions, double scale, float* out);

}  // namespace quire
