// Cross-entropy and divergence from a teacher on rows of logits; see teacher.rs.
// HAS_GRADS: the gradient of the logits is wanted, IN_PLACE in their place, else in `dlogits`.

// words: four lists of n_all: tokens that are learned, their targets, factors of gradients,
// weights. Row 0 of the logits is number `first` of them. Rows have `n_row` and `n_row_taught`
// places, of which both heads have the first `n_common` ids; the gradient of what is no logit is
// zero.
struct Params {
    u32 n_rows, n_vocab, first, n_all, n_row, n_common, n_row_taught;
    float factor, of_student, of_teacher, temperature, share;
};

// A group takes a row: the largest numbers, then the sums of exponentials, then the gradient.
KERNEL head_loss_taught(const T0* words, const T1* taught, T2* logits, T3* dlogits, T4* nll,
                        T5* top1, T6* kl, Params p) {
    size_t row = group_of();
    if (row >= p.n_rows) return;
    const u32* lists = (const u32*)words;
    size_t begin = row * p.n_row, begin_taught = row * p.n_row_taught, at = p.first + row;
    u32 token = lists[at], id = lists[p.n_all + at];
    float target = load(logits, begin + id);
    float most = -3.0e38f, most_p = -3.0e38f, most_q = -3.0e38f;
    for (u32 i = threadIdx.x; i < p.n_vocab; i += THREADS) {
        float logit = load(logits, begin + i);
        most = fmaxf(most, logit * p.factor);
        if (i < p.n_common) {
            most_p = fmaxf(most_p, logit * p.of_student);
            most_q = fmaxf(most_q, load(taught, begin_taught + i) * p.of_teacher);
        }
    }
    float top = group_max(most), top_p = group_max(most_p), top_q = group_max(most_q);
    float sum = 0.0f, sum_p = 0.0f, sum_q = 0.0f, dot = 0.0f;
    for (u32 i = threadIdx.x; i < p.n_vocab; i += THREADS) {
        float logit = load(logits, begin + i);
        sum += __expf(fmaf(logit, p.factor, -top));
        if (i < p.n_common) {
            float ln_p = fmaf(logit, p.of_student, -top_p);
            float ln_q = fmaf(load(taught, begin_taught + i), p.of_teacher, -top_q);
            float q = __expf(ln_q);
            sum_p += __expf(ln_p);
            sum_q += q;
            dot += q * (ln_q - ln_p);
        }
    }
    sum = group_sum(sum), sum_p = group_sum(sum_p), sum_q = group_sum(sum_q), dot = group_sum(dot);
    if (threadIdx.x == 0) {
        store(nll, token, logf(sum) - fmaf(target, p.factor, -top));
        store(top1, token, target * p.factor >= top ? 1.0f : 0.0f);
        store(kl, token, dot / sum_q - logf(sum_q) + logf(sum_p));
    }
    if (!HAS_GRADS) return;
    float scale = __uint_as_float(lists[2 * (size_t)p.n_all + at]);
    float of_targets = scale * (1.0f - p.share), of_teacher = scale * p.share * p.temperature;
    float over = of_targets / sum, over_p = of_teacher / sum_p, over_q = of_teacher / sum_q;
    for (u32 i = threadIdx.x; i < p.n_row; i += THREADS) {
        float dl = 0.0f;
        if (i < p.n_vocab) {
            float logit = load(logits, begin + i);
            dl = __expf(fmaf(logit, p.factor, -top)) * over;
            if (i < p.n_common) {
                float ln_q = fmaf(load(taught, begin_taught + i), p.of_teacher, -top_q);
                dl += __expf(fmaf(logit, p.of_student, -top_p)) * over_p - __expf(ln_q) * over_q;
            }
            if (i == id) dl -= of_targets;
        }
        if (IN_PLACE) store(logits, begin + i, dl);
        else store(dlogits, begin + i, dl);
    }
}
