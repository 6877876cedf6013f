// Merges of SentencePiece's BPE (Kudo and Richardson 2018) that a text can need.
#pragma once

#include <cstdint>

namespace quire {

// Write the two sides of the merge that makes each piece, firsts and seconds [num_pieces]; -1: no merge makes it. Piece i has
// the characters (UTF-32) up to stops[i] from where the one before ends. Merges with a lower rank come first; of equal ranks
// that with the longer result, then that with the shorter first side, then that of the earlier piece. Results are pieces of
// which is_result is 1.
//
// A piece comes about while no merge has crossed its ends, so the merges within it are those of its text alone: it has one
// last merge, and other pairs of pieces with its text never merge. False, with the sides undefined, where that does not
// hold or pieces have the same text: a text also begins as pieces that are no characters (bytes, the unknown piece), which
// are no results; one of them is a side of a pair, or they are written in very many forms.
bool piece_merges(const std::uint32_t* characters, const std::int64_t* stops, const std::int64_t* ranks, const std::uint8_t* is_result, long num_pieces,
                  std::int32_t* firsts, std::int32_t* seconds);

}  // namespace quire
