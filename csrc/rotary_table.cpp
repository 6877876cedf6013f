#include "rotary_table.hpp"

#include <cmath>

#include "thread_pool.hpp"

namespace quire {

void rotary_table(const float* frequencies, long num_pairs, long first_position, long num_positions, double scale, float* out) {
    constexpr long positions_at_once = 64;
    share_range(num_positions, positions_at_once, [&](long begin, long end) {
        for (long position = begin; position < end; position++) {
            float *cosines = out + position * 2 * num_pairs, *sines = cosines + num_pairs;
            for (long pair = 0; pair < num_pairs; pair++) {
                const double angle = static_cast<float>(first_position + position) * frequencies[pair];  // rounded to float, as models are trained
                cosines[pair] = static_cast<float>(std::cos(angle) * scale);
                sines[pair] = static_cast<float>(std::sin(angle) * scale);
            }
        }
    });
}

}  // namespace quire
