// Lookups of speculative decoding: where the last tokens of a row occurred before, and what followed them there. Nothing is
// searched: an index has the places of each run of one or two tokens. The plain forms of both lookups, with the reasons
// of their rules, are in quire/execution/drafting (ngram.py and suffix.py).
#pragma once

#include <cstdint>
#include <vector>

namespace quire {

using Token = std::int32_t;

constexpr long NONE = -1;

// Positions at which runs of `width` tokens (1 or 2) end in a text that grows, latest first. It has 4 to 8 bytes for a
// token in each of two tables. Runs that share a bucket are in one list, so tokens are to be compared.
class RunIndex {
public:
    explicit RunIndex(long width) : width_(width) {}

    // Add the runs that end at positions from size() to stop - 1 of the text.
    void add(const Token* text, long stop);
    void clear() { heads_ = {}, earlier_ = {}; }
    long size() const { return static_cast<long>(earlier_.size()); }
    // The latest position in the list of the run that ends with *last, and the one before a position; NONE: no more.
    long latest(const Token* last) const { return heads_.empty() ? NONE : heads_[bucket(last)]; }
    long earlier(long position) const { return earlier_[position]; }

private:
    std::size_t bucket(const Token* last) const;

    long width_;
    int shift_ = 0;
    std::vector<std::int32_t> heads_, earlier_;
};

// Draft of a row.
struct Draft {
    std::int64_t row;
    std::vector<Token> tokens;
};

// Token ids [max_rows, max_len] of all rows, without gaps, and the most tokens of a draft. A row's last known token is at
// position `last`: what is behind it is no part of the row.
struct Rows {
    const Token* token_ids;
    long max_rows, max_len, max_drafts;

    const Token* tokens(std::int64_t row) const { return token_ids + row * max_len; }
    long max_drafts_behind(long last) const;
};

// Drafts of what followed the last earlier occurrence of the longest n-gram, of min_size to max_size tokens, that ends
// the row.
class NgramLookup {
public:
    NgramLookup(Rows rows, long min_size, long max_size);

    // Forget a row, which has a new owner.
    void reset(long row) { indexes_[row].clear(); }
    // The drafts of those of `rows` [num] that have one. Between resets a row's tokens do not change.
    std::vector<Draft> draft(const std::int64_t* rows, const std::int64_t* last, long num);

private:
    Rows rows_;
    long min_size_, max_size_;
    std::vector<RunIndex> indexes_;
};

// Constants of suffix lookups, with the names that suffix.py has for them.
struct SuffixRules {
    long min_run, max_run, max_places;
    double min_share;
    long num_texts, max_text, chunk, overlap;
    Token gap;
};

// Drafts of the most frequent continuation of a row's last tokens in the row and in a text of recent outputs.
class SuffixLookup {
public:
    SuffixLookup(Rows rows, SuffixRules rules);

    // Begin a row with num_tokens known tokens, which do not go to the text; first add to the previous owner's text what
    // is missing there. text: of the row's scope.
    void reset(long row, long num_tokens, long text);
    // Empty a text. Rows that had it have none from now on.
    void clear(long text);
    // The drafts of those of `rows` [num] that have one; then add new tokens to the texts.
    std::vector<Draft> draft(const std::int64_t* rows, const std::int64_t* last, long num);

private:
    struct Text {
        std::vector<Token> tokens;  // chunks of outputs, a gap behind each
        RunIndex index{2};
    };
    struct Row {
        RunIndex index{2};
        long text = NONE, num_added = 0;
        std::vector<Token> pending;  // tokens that the text lacks, and up to `overlap` before them; empty: none
    };
    struct Matches;

    void match(Matches& best, const Token* text, long size, const RunIndex& index, const Token* tokens, long last) const;
    std::vector<Token> continuation(const Row& row, const Token* tokens, long last, long limit) const;
    std::vector<Token> vote(const Matches& matches, long limit) const;
    void add_output(Row& row, const Token* tokens, long num_tokens);
    void append(Text& text, const Token* chunk, long size);

    Rows rows_;
    SuffixRules rules_;
    std::vector<Row> states_;
    std::vector<Text> texts_;
};

}  // namespace quire
