// From the words of CUDA to those of g++, on text that g++ -E has been over.
//
//     __global__ __device__ __host__ __constant__ __launch_bounds__(...)   removed
//     __shared__ T x[n];             static thread_local T x[n];
//     extern __shared__ T x[];       T (*const x) = (T (*))emu_now.dynamic_shared;
//
// and behind it a table of the kernels: `extern "C" __global__` functions under their own names,
// and name expressions under lowered names. Types are left to templates of cuda_device.h.
//
// Not here: a parser. A kernel is the word before the first parenthesis behind `__global__`.
#include "rewrite.h"

#include <cctype>

namespace {

using std::string;
using std::vector;

// ---- Words --------------------------------------------------------------------------------------

enum class Kind { Word, Text, Line, Sign };

struct Token {
    Kind kind;
    string space, text; // `space` is what stands before it
};

bool word_start(char c) { return isalpha((unsigned char)c) || c == '_'; }
bool word_part(char c) { return isalnum((unsigned char)c) || c == '_'; }

size_t end_of_quoted(const string &s, size_t at) {
    char quote = s[at++];
    while (at < s.size() && s[at] != quote) at += s[at] == '\\' ? 2 : 1;
    return at + 1;
}

vector<Token> tokens_of(const string &s) {
    vector<Token> tokens;
    size_t at = 0;
    while (at < s.size()) {
        Token t;
        while (at < s.size() && isspace((unsigned char)s[at])) t.space += s[at++];
        size_t from = at;
        bool line_begins = t.space.find('\n') != string::npos || tokens.empty();
        if (at >= s.size()) {
            t.kind = Kind::Sign;
        } else if (s[at] == '#' && line_begins) {
            t.kind = Kind::Line;
            while (at < s.size() && s[at] != '\n') at++;
        } else if (word_start(s[at])) {
            t.kind = Kind::Word;
            while (at < s.size() && word_part(s[at])) at++;
        } else if (isdigit((unsigned char)s[at])) {
            t.kind = Kind::Text; // a number, perhaps with ' or a sign of its exponent left out
            while (at < s.size() && (word_part(s[at]) || s[at] == '.' || s[at] == '\'')) at++;
        } else if (s[at] == '"' || s[at] == '\'') {
            t.kind = Kind::Text;
            at = end_of_quoted(s, at);
        } else {
            t.kind = Kind::Sign;
            at++;
        }
        t.text = s.substr(from, at - from);
        tokens.push_back(t);
    }
    return tokens;
}

// The index behind the parenthesis that closes the one at `at`.
size_t behind_parentheses(const vector<Token> &t, size_t at) {
    int depth = 0;
    for (; at < t.size(); at++) {
        if (t[at].text == "(") depth++;
        if (t[at].text == ")" && --depth == 0) return at + 1;
    }
    return at;
}

string joined(const vector<Token> &t, size_t from, size_t to) {
    string s;
    for (size_t i = from; i < to; i++) s += (t[i].kind == Kind::Line ? "\n" : " ") + t[i].text;
    return s;
}

// ---- Rewriting ----------------------------------------------------------------------------------

struct Kernel {
    string name, bounds;
};

struct Rewriter {
    vector<Token> t;
    string out;
    vector<Kernel> kernels;
    string braces;           // one letter per open brace: c extern "C", n namespace, o other
    char next_brace = 'o';
    bool c_declaration = false;
    string bounds;
    bool has_shared = false;

    bool is(size_t i, const char *text) const { return i < t.size() && t[i].text == text; }

    void keep_lines(size_t from, size_t to) {
        for (size_t i = from; i < to; i++)
            for (char c : t[i].space)
                if (c == '\n') out += c;
    }

    // `extern ... __shared__ T name[]...;` from `at`: returns the index behind it, or `at`.
    size_t dynamic_shared(size_t at) {
        size_t end = at;
        bool shared = false;
        for (; end < t.size() && end < at + 64; end++) {
            if (is(end, ";") || is(end, "{")) break;
            shared |= is(end, "__shared__");
        }
        if (!shared || !is(end, ";")) return at;
        string type, name, rest;
        for (size_t i = at; i < end; i++) {
            if (is(i, "extern") || is(i, "__shared__")) continue;
            if (is(i, "__attribute__")) {
                i = behind_parentheses(t, i + 1) - 1;
            } else if (is(i + 1, "[") && name.empty()) {
                name = t[i].text;
                rest = joined(t, i + 3, end); // behind the empty brackets
                break;
            } else {
                type += " " + t[i].text;
            }
        }
        if (name.empty()) return at;
        bool in_function = braces.find('o') != string::npos;
        if (in_function)
            out += type + " (*const " + name + ")" + rest + " = (" + type + " (*)" + rest +
                   ")emu_now.dynamic_shared;";
        else
            out += "static EmuDynamicShared<" + type + rest + "> " + name + ";";
        keep_lines(at + 1, end + 1);
        return end + 1;
    }

    // Behind `__global__`: the bounds, wherever they stand, and the name before the parameters.
    void kernel(size_t at) {
        bool is_c = c_declaration || braces.find('c') != string::npos;
        for (; at < t.size() && !is(at, ";") && !is(at, "{"); at++) {
            if (t[at].kind != Kind::Word || !is(at + 1, "(")) continue;
            if (is(at, "__launch_bounds__")) {
                bounds = joined(t, at + 1, behind_parentheses(t, at + 1));
                at = behind_parentheses(t, at + 1) - 1;
            } else if (is(at, "__attribute__")) {
                at = behind_parentheses(t, at + 1) - 1;
            } else {
                bool known = !is_c;
                for (const Kernel &k : kernels) known |= k.name == t[at].text;
                if (!known) kernels.push_back({t[at].text, bounds});
                break;
            }
        }
        bounds.clear();
    }

    void brace(size_t i) {
        if (is(i, "{")) {
            braces += next_brace;
            next_brace = 'o';
        } else if (is(i, "}") && !braces.empty()) {
            braces.pop_back();
        }
        if (is(i, "{") || is(i, "}") || is(i, ";")) c_declaration = false;
        if (is(i, ";")) next_brace = 'o';
    }

    size_t word(size_t i) {
        static const char *removed[] = {"__device__", "__host__", "__constant__",
                                        "__grid_constant__"};
        for (const char *r : removed)
            if (is(i, r)) return i + 1;
        if (is(i, "__global__")) {
            kernel(i + 1);
            return i + 1;
        }
        if (is(i, "__launch_bounds__")) {
            size_t end = behind_parentheses(t, i + 1);
            if (bounds.empty()) bounds = joined(t, i + 1, end);
            keep_lines(i + 1, end);
            return end;
        }
        if (is(i, "__shared__")) {
            has_shared = true;
            // `used`, or g++ would make a constant of what the program itself never writes.
            out += i && is(i - 1, "static") ? "" : "static ";
            out += "thread_local __attribute__((used))";
            return i + 1;
        }
        if (is(i, "extern") && is(i + 1, "\"C\"")) {
            c_declaration = !is(i + 2, "{");
            if (!c_declaration) next_brace = 'c';
        } else if (is(i, "extern")) {
            size_t end = dynamic_shared(i);
            if (end != i) return end;
        }
        if (is(i, "namespace")) next_brace = 'n';
        out += t[i].text;
        return i + 1;
    }

    void run(const string &preprocessed) {
        t = tokens_of(preprocessed);
        for (size_t i = 0; i < t.size();) {
            out += t[i].space;
            if (t[i].kind == Kind::Word) {
                i = word(i);
            } else {
                if (t[i].kind == Kind::Sign) brace(i);
                out += t[i++].text;
            }
        }
    }
};

string entry_of(const string &shown, const string &function, const string &bounds) {
    string bound = bounds.empty() ? "1024" : "emu_bound" + bounds;
    return "    {\"" + shown + "\", emu_entry<&" + function + ">, decltype(emu_params(&" +
           function + "))::sizes, " + bound + "},\n";
}

string table_of(const Rewriter &r, const vector<string> &name_expressions) {
    string s = "\n# 1 \"the table of kernels\"\n";
    if (r.has_shared)
        s += "static thread_local char emu_tls_byte;\n"
             "extern \"C\" EMU_TABLE void *emu_tls_anchor() { return &emu_tls_byte; }\n";
    s += "extern \"C\" EMU_TABLE const EmuKernel emu_kernels[] = {\n";
    for (const Kernel &k : r.kernels) s += entry_of(k.name, k.name, k.bounds);
    for (size_t i = 0; i < name_expressions.size(); i++) {
        const string &e = name_expressions[i];
        s += entry_of(lowered_name(i), e[0] == '&' ? e.substr(1) : e, "");
    }
    s += "    {nullptr, nullptr, nullptr, 0},\n};\n";
    string attribute = "__attribute__((visibility(\"default\"), used))";
    for (size_t at; (at = s.find("EMU_TABLE")) != string::npos;) s.replace(at, 9, attribute);
    return s;
}

} // namespace

std::string lowered_name(size_t i) { return "emu_name_" + std::to_string(i); }

std::string rewritten(const string &preprocessed, const vector<string> &name_expressions) {
    Rewriter r;
    r.run(preprocessed);
    return r.out + table_of(r, name_expressions);
}
