// A lookup walks the list of the places where a row's last tokens may have occurred, the latest first, and compares what is
// before them. A new token costs a few reads of memory, however long the row is.
#include "lookup.hpp"

#include <algorithm>
#include <bit>

namespace quire {
namespace {

constexpr std::size_t MIN_HEADS = 64;

// The number of tokens, at most `most`, that are the same up to text[place] and up to tokens[last].
long common(const Token* text, long place, const Token* tokens, long last, long most) {
    most = std::min({most, place + 1, last + 1});
    long size = 0;
    while (size < most && text[place - size] == tokens[last - size]) size++;
    return size;
}

// Bring an index up to a row's tokens before the last one, so that it lacks the row's own end.
void update(RunIndex& index, const Token* tokens, long last) {
    if (index.size() > last) index.clear();
    index.add(tokens, last);
}

}  // namespace

std::size_t RunIndex::bucket(const Token* last) const {
    std::uint64_t mixed = std::uint32_t(last[0]) * 0x9E3779B97F4A7C15u;
    if (width_ > 1) mixed ^= std::uint32_t(last[-1]) * 0xC2B2AE3D27D4EB4Fu;
    return mixed * 0xD6E8FEB86659FD93u >> shift_;
}

void RunIndex::add(const Token* text, long stop) {
    long first = size();
    if (stop <= first) return;
    earlier_.resize(stop, NONE);
    if (stop > static_cast<long>(heads_.size())) {
        heads_.assign(std::bit_ceil(std::max<std::size_t>(stop, MIN_HEADS)), NONE);
        shift_ = 64 - std::countr_zero(heads_.size());
        first = 0;
    }
    for (long i = std::max(first, width_ - 1); i < stop; i++) {
        std::int32_t& head = heads_[bucket(text + i)];
        earlier_[i] = head;
        head = static_cast<std::int32_t>(i);
    }
}

long Rows::max_drafts_behind(long last) const { return std::min(max_drafts, max_len - 1 - last); }

NgramLookup::NgramLookup(Rows rows, long min_size, long max_size)
    : rows_(rows), min_size_(min_size), max_size_(max_size), indexes_(rows.max_rows, RunIndex(std::min(min_size, 2l))) {}

std::vector<Draft> NgramLookup::draft(const std::int64_t* rows, const std::int64_t* last, long num) {
    std::vector<Draft> drafts;
    for (long i = 0; i < num; i++) {
        const Token* tokens = rows_.tokens(rows[i]);
        RunIndex& index = indexes_[rows[i]];
        update(index, tokens, last[i]);
        const long limit = rows_.max_drafts_behind(last[i]);
        if (limit <= 0 || last[i] < min_size_) continue;
        long best = 0, found = NONE;
        for (long at = index.latest(tokens + last[i]); at != NONE && best < max_size_; at = index.earlier(at)) {
            const long size = common(tokens, at, tokens, last[i], max_size_);
            if (size > best) best = size, found = at;
        }
        if (best < min_size_) continue;
        const Token* begin = tokens + found + 1;
        drafts.push_back({rows[i], {begin, begin + std::min(limit, last[i] - found)}});
    }
    return drafts;
}

SuffixLookup::SuffixLookup(Rows rows, SuffixRules rules)
    : rows_(rows), rules_(rules), states_(rows.max_rows), texts_(rules.num_texts) {}

void SuffixLookup::reset(long row, long num_tokens, long text) {
    Row& state = states_[row];
    if (state.text != NONE && !state.pending.empty())
        append(texts_[state.text], state.pending.data(), static_cast<long>(state.pending.size()));
    state.index.clear();
    state.pending.clear();
    state.num_added = num_tokens;
    state.text = text;
}

void SuffixLookup::clear(long text) {
    texts_[text] = {};
    for (Row& row : states_)
        if (row.text == text) row.text = NONE;
}

std::vector<Draft> SuffixLookup::draft(const std::int64_t* rows, const std::int64_t* last, long num) {
    std::vector<Draft> drafts;
    for (long i = 0; i < num; i++) {
        Row& state = states_[rows[i]];
        const Token* tokens = rows_.tokens(rows[i]);
        update(state.index, tokens, last[i]);
        const long limit = rows_.max_drafts_behind(last[i]);
        if (limit <= 0 || last[i] < 1) continue;
        std::vector<Token> found = continuation(state, tokens, last[i], limit);
        if (!found.empty()) drafts.push_back({rows[i], std::move(found)});
    }
    for (long i = 0; i < num; i++) add_output(states_[rows[i]], rows_.tokens(rows[i]), last[i] + 1);
    return drafts;
}

// Occurrences of the longest suffix of a row that was found: tokens behind each, up to the end of its text.
struct SuffixLookup::Matches {
    struct Behind {
        const Token* tokens;
        long num_tokens;
    };
    long size = 0;
    std::vector<Behind> places;  // the likeliest first
};

// Add the matches in a text, the latest first; longer ones replace those before. At most max_places are kept.
void SuffixLookup::match(
    Matches& best, const Token* text, long size, const RunIndex& index, const Token* tokens, long last) const {
    const long longest = std::min(rules_.max_run, last + 1), max_places = rules_.max_places;
    for (long at = index.latest(tokens + last); at != NONE; at = index.earlier(at)) {
        const bool is_full = static_cast<long>(best.places.size()) == max_places;
        if (best.size == longest && is_full) return;
        const long own = common(text, at, tokens, last, longest);
        if (own < std::max(best.size, rules_.min_run) || (own == best.size && is_full)) continue;
        if (own > best.size) best.size = own, best.places.clear();
        best.places.push_back({text + at + 1, size - at - 1});
    }
}

std::vector<Token> SuffixLookup::continuation(const Row& row, const Token* tokens, long last, long limit) const {
    Matches matches;
    match(matches, tokens, last + 1, row.index, tokens, last);
    if (row.text != NONE) {
        const Text& text = texts_[row.text];
        match(matches, text.tokens.data(), static_cast<long>(text.tokens.size()), text.index, tokens, last);
    }
    return vote(matches, std::min(limit, matches.size));
}

std::vector<Token> SuffixLookup::vote(const Matches& matches, long limit) const {
    std::vector<Token> draft;
    std::vector<Matches::Behind> voters = matches.places;
    const auto has_token = [&](const Matches::Behind& each, long index) {
        return each.num_tokens > index && each.tokens[index] != rules_.gap;
    };
    std::erase_if(voters, [&](const auto& each) { return !has_token(each, 0); });
    const double least = rules_.min_share * static_cast<double>(voters.size());
    for (long index = 0; index < limit && !voters.empty(); index++) {
        Token chosen = 0;
        long most = 0;
        for (const auto& own : voters) {  // equal counts: the first one's
            const Token token = own.tokens[index];
            const long count = std::count_if(
                voters.begin(), voters.end(), [&](const auto& each) { return each.tokens[index] == token; });
            if (count > most) chosen = token, most = count;
        }
        if (static_cast<double>(most) < least) break;
        draft.push_back(chosen);
        std::erase_if(voters, [&](const auto& each) {
            return each.tokens[index] != chosen || !has_token(each, index + 1);
        });
    }
    return draft;
}

void SuffixLookup::add_output(Row& row, const Token* tokens, long num_tokens) {
    if (row.text == NONE) return;
    const long start = std::max({row.num_added - rules_.overlap, num_tokens - rules_.max_text / 4, 0l});
    row.pending.clear();
    if (num_tokens - row.num_added >= rules_.chunk) {
        append(texts_[row.text], tokens + start, num_tokens - start);
        row.num_added = num_tokens;
    } else if (num_tokens > row.num_added) {
        row.pending.assign(tokens + start, tokens + num_tokens);
    }
}

void SuffixLookup::append(Text& text, const Token* chunk, long size) {
    if (static_cast<long>(text.tokens.size()) + size + 1 > rules_.max_text) {  // keep the later half
        text.tokens.erase(text.tokens.begin(), text.tokens.begin() + rules_.max_text / 2);
        text.index.clear();
    }
    text.tokens.insert(text.tokens.end(), chunk, chunk + size);
    text.tokens.push_back(rules_.gap);
    text.index.add(text.tokens.data(), static_cast<long>(text.tokens.size()));
}

}  // namespace quire
