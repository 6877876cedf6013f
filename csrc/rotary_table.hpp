// Cosines and sines of rotary positions (Su et al. 2021).
#pragma once

namespace quire {

// Write out [num_positions, 2 * num_pairs]: the cosines of the angles of each position from `first_position` on, then the sines, times `scale`. An angle is
// a product of floats, rounded to one; all else is computed in double and rounded once. frequencies [num_pairs]: radians per
// position. All threads take part.
void rotary_table(const float* frequencies, long num_pairs, long first_position, long num_positions, double scale, float* out);

}  // namespace quire
