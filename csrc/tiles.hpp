// The tiles of the matrix unit (AMX): eight registers of up to 16 rows x 64 bytes.
#pragma once

#ifdef __AMX_BF16__

#include "vec.hpp"

namespace quire::ISA {

constexpr long TILE_ROWS = 16;

struct alignas(64) TileShapes {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t rows[16] = {};
};

// Tiles 0 to 3 are sums, 4 and 5 the rows that are multiplied, with so many words of 4 bytes, 6 and 7 what they are
// multiplied with.
inline void shape_tiles(long rows, long words = TILE_ROWS) {
    TileShapes shapes;
    for (int tile = 0; tile < 8; tile++) {
        shapes.row_bytes[tile] = static_cast<std::uint16_t>(tile == 4 || tile == 5 ? 4 * words : 64);
        shapes.rows[tile] = static_cast<std::uint8_t>(tile < 6 ? rows : words);
    }
    __asm__ volatile("" ::: "memory");  // gcc 12 believes that the instruction reads 8 bytes of its operand
    _tile_loadconfig(&shapes);
}

}  // namespace quire::ISA

#endif
