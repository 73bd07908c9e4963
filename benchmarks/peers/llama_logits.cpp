// Logits of a GGUF model by llama.cpp, on the CPU: token ids (int32) come on standard input, [tokens, vocabulary] fp32 go to
// standard output. With a second argument, so many greedy tokens follow the text: their ids (int32) go there instead.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "llama.h"

static int likeliest(const float* logits, int count) {
  int best = 0;
  for (int i = 1; i < count; ++i)
    if (logits[i] > logits[best]) best = i;
  return best;
}

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  const int more = argc > 2 ? std::atoi(argv[2]) : 0;
  std::vector<llama_token> ids;
  for (llama_token id; std::fread(&id, sizeof id, 1, stdin) == 1;) ids.push_back(id);
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  llama_backend_init();
  llama_model* model = llama_model_load_from_file(argv[1], llama_model_default_params());
  if (model == nullptr) return 1;
  llama_context_params params = llama_context_default_params();
  params.n_ctx = static_cast<uint32_t>(ids.size() + more + 1);
  params.n_batch = params.n_ubatch = 64;
  params.n_threads = params.n_threads_batch = 1;
  llama_context* context = llama_init_from_model(model, params);
  if (context == nullptr) return 1;
  const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
  llama_batch batch = llama_batch_init(64, 0, 1);
  int position = 0;
  // Reads ids [first, last); the logits of all of them
  const auto read = [&](size_t first, size_t last) {
    batch.n_tokens = static_cast<int32_t>(last - first);
    for (size_t i = first; i < last; ++i) {
      const size_t at = i - first;
      batch.token[at] = ids[i], batch.pos[at] = position++, batch.n_seq_id[at] = 1, batch.seq_id[at][0] = 0, batch.logits[at] = 1;
    }
    return llama_decode(context, batch) == 0;
  };
  for (size_t first = 0; first < ids.size(); first += 64) {
    const size_t last = first + 64 < ids.size() ? first + 64 : ids.size();
    if (!read(first, last)) return 1;
    if (more == 0)
      for (size_t i = 0; i < last - first; ++i)
        std::fwrite(llama_get_logits_ith(context, static_cast<int32_t>(i)), sizeof(float), vocabulary, stdout);
  }
  for (int made = 0; made < more; ++made) {
    const llama_token next = likeliest(llama_get_logits_ith(context, batch.n_tokens - 1), vocabulary);
    std::fwrite(&next, sizeof next, 1, stdout);
    ids.push_back(next);
    if (!read(ids.size() - 1, ids.size())) return 1;
  }
}
