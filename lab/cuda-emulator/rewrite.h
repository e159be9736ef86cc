// The part of libnvrtc that changes the text of a program; see rewrite.cpp.
#pragma once
#include <string>
#include <vector>

// `preprocessed` for g++, with the table of its kernels.
std::string rewritten(const std::string &preprocessed,
                      const std::vector<std::string> &name_expressions);

// The name in that table of name expression `i`.
std::string lowered_name(size_t i);
