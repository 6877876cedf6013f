#include "piece_merges.hpp"

#include <algorithm>
#include <bit>
#include <limits>
#include <vector>

namespace quire {
namespace {

constexpr std::int32_t NO_PIECE = -1;
constexpr std::size_t MAX_FORMS = 64;
constexpr std::int64_t NEVER = std::numeric_limits<std::int64_t>::max();

// Part of all pieces' characters.
struct Text {
    const std::uint32_t* begin;
    long size;

    Text first(long count) const { return {begin, count}; }
    Text last(long count) const { return {begin + size - count, count}; }
};

// Pieces by their texts: a table with open addresses, two thirds full at most.
class Pieces {
public:
    Pieces(const std::uint32_t* characters, const std::int64_t* stops, long num_pieces) : characters_(characters), stops_(stops) {
        slots_.assign(std::bit_ceil(static_cast<std::size_t>(num_pieces) * 3 / 2 + 1), {0, NO_PIECE});
    }

    Text text(long piece) const {
        const long start = piece ? stops_[piece - 1] : 0;
        return {characters_ + start, stops_[piece] - start};
    }

    // False: another piece has the text.
    bool add(long piece) {
        const std::uint64_t hashed = hash(text(piece));
        Slot& slot = slots_[slot_of(hashed)];
        if (slot.piece != NO_PIECE) return false;
        slot = {hashed, static_cast<std::int32_t>(piece)};
        return true;
    }

    std::int32_t find(Text text) const { return slots_[slot_of(hash(text))].piece; }

private:
    struct Slot {
        std::uint64_t hash;  // texts with the same are taken for equal: to compare them would take two more misses of the cache
        std::int32_t piece;
    };

    static std::uint64_t hash(Text text) {
        std::uint64_t mixed = 0x9E3779B97F4A7C15;
        for (long i = 0; i < text.size; i++) {
            mixed = (mixed ^ text.begin[i]) * 0xD6E8FEB86659FD93;
            mixed ^= mixed >> 32;
        }
        return mixed;
    }

    // The slot of a text, or the empty one where it would be.
    std::size_t slot_of(std::uint64_t hashed) const {
        std::size_t slot = hashed & (slots_.size() - 1);
        while (slots_[slot].piece != NO_PIECE && slots_[slot].hash != hashed) slot = (slot + 1) & (slots_.size() - 1);
        return slot;
    }

    const std::uint32_t* characters_;
    const std::int64_t* stops_;
    std::vector<Slot> slots_;
};

// Whether no piece that is longer than a character and no result is, with another piece, the text of a result.
bool are_sides_results(const Pieces& pieces, const std::uint8_t* is_result, long num_pieces) {
    struct Form {
        long size;
        std::uint32_t first, last;  // characters

        bool operator==(const Form&) const = default;
    };
    std::vector<Form> forms;  // byte pieces' texts: nearly all are written like <0x0A>
    for (long piece = 0; piece < num_pieces; piece++) {
        const Text text = pieces.text(piece);
        if (text.size < 2 || is_result[piece]) continue;
        if (const Form form{text.size, text.begin[0], text.begin[text.size - 1]}; std::ranges::find(forms, form) == forms.end()) forms.push_back(form);
        if (forms.size() > MAX_FORMS) return false;
    }
    const auto is_side = [&](const Form& form, Text side, Text rest) {
        if (side.begin[0] != form.first || side.begin[side.size - 1] != form.last) return false;
        const std::int32_t found = pieces.find(side);
        return found != NO_PIECE && !is_result[found] && pieces.find(rest) != NO_PIECE;
    };
    for (long piece = 0; piece < num_pieces; piece++) {
        const Text text = pieces.text(piece);
        if (!is_result[piece]) continue;
        for (const Form& form : forms) {
            if (form.size >= text.size) continue;
            const long rest = text.size - form.size;
            if (is_side(form, text.first(form.size), text.last(rest)) || is_side(form, text.last(form.size), text.first(rest))) return false;
        }
    }
    return true;
}

// A text while its pieces merge.
class Merging {
public:
    Merging(const Pieces& pieces, const std::int64_t* ranks, const std::uint8_t* is_result) : pieces_(pieces), ranks_(ranks), is_result_(is_result) {}

    // The sides of the last merge, if the whole text becomes a piece.
    bool run(Text text, std::int32_t& first, std::int32_t& second) {
        symbols_.clear();
        for (long i = 0; i < text.size; i++) symbols_.push_back({{text.begin + i, 1}, pieces_.find({text.begin + i, 1}), NO_PIECE, NEVER});
        for (std::size_t i = 0; i + 1 < symbols_.size(); i++) look_right(i);
        while (symbols_.size() > 1) {
            std::size_t best = 0;
            for (std::size_t i = 1; i + 1 < symbols_.size(); i++)
                if (symbols_[i].rank < symbols_[best].rank || (symbols_[i].rank == symbols_[best].rank && is_before(symbols_[i], symbols_[best]))) best = i;
            if (symbols_[best].rank == NEVER) return false;
            first = symbols_[best].piece, second = symbols_[best + 1].piece;
            symbols_[best].text.size += symbols_[best + 1].text.size;
            symbols_[best].piece = symbols_[best].merged;
            symbols_.erase(symbols_.begin() + static_cast<long>(best) + 1);
            look_right(best);
            if (best > 0) look_right(best - 1);
        }
        return text.size > 1;
    }

private:
    struct Symbol {
        Text text;
        std::int32_t piece, merged;  // itself, and with the next one
        std::int64_t rank;           // rank of the merge with the next one
    };

    void look_right(std::size_t i) {
        Symbol& symbol = symbols_[i];
        symbol.merged = NO_PIECE, symbol.rank = NEVER;
        if (i + 1 == symbols_.size() || symbol.piece == NO_PIECE || symbols_[i + 1].piece == NO_PIECE) return;
        const std::int32_t found = pieces_.find({symbol.text.begin, symbol.text.size + symbols_[i + 1].text.size});
        if (found != NO_PIECE && is_result_[found]) symbol.merged = found, symbol.rank = ranks_[found];
    }

    // Whether a symbol merges before one to its left, with a merge of the same rank.
    bool is_before(const Symbol& symbol, const Symbol& left) const {
        const std::int32_t a = symbol.merged, b = left.merged;
        if (a == b) return symbol.text.size < left.text.size;
        if (pieces_.text(a).size != pieces_.text(b).size) return pieces_.text(a).size > pieces_.text(b).size;
        if (symbol.text.size != left.text.size) return symbol.text.size < left.text.size;
        return a < b;
    }

    const Pieces& pieces_;
    const std::int64_t* ranks_;
    const std::uint8_t* is_result_;
    std::vector<Symbol> symbols_;
};

}  // namespace

bool piece_merges(const std::uint32_t* characters, const std::int64_t* stops, const std::int64_t* ranks, const std::uint8_t* is_result, long num_pieces,
                  std::int32_t* firsts, std::int32_t* seconds) {
    Pieces pieces(characters, stops, num_pieces);
    for (long piece = 0; piece < num_pieces; piece++)
        if (!pieces.add(piece)) return false;
    if (!are_sides_results(pieces, is_result, num_pieces)) return false;
    Merging merging(pieces, ranks, is_result);
    for (long piece = 0; piece < num_pieces; piece++)
        if (!is_result[piece] || !merging.run(pieces.text(piece), firsts[piece], seconds[piece])) firsts[piece] = seconds[piece] = NO_PIECE;
    return true;
}

}  // namespace quire
