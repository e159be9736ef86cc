// Cross-entropy and divergence from a teacher on rows of logits; see teacher.rs.
// HAS_GRADS: logits become their gradient. IN_PLACE is for CUDA; here they always do so in place.

// Four lists of n_all: tokens that are learned, their targets, factors of gradients, weights.
@group(0) @binding(0) var<storage, read> lists: array<u32>;
@group(0) @binding(1) var<storage, read> taught: array<f32>; // (n_rows, n_row_taught)
@group(0) @binding(2) var<storage, read_write> logits: array<f32>; // (n_rows, n_row)
@group(0) @binding(3) var<storage, read_write> unused: array<f32>; // (1)
@group(0) @binding(4) var<storage, read_write> nll: array<f32>; // (n_tok)
@group(0) @binding(5) var<storage, read_write> top1: array<f32>; // (n_tok)
@group(0) @binding(6) var<storage, read_write> kl: array<f32>; // (n_tok)
// Row 0 of the logits is number `first` of the lists; both heads have the first `n_common` ids.
struct Params {
    n_rows: u32, n_vocab: u32, first: u32, n_all: u32, n_row: u32, n_common: u32, n_row_taught: u32,
    factor: f32, of_student: f32, of_teacher: f32, temperature: f32, share: f32,
}
@group(0) @binding(7) var<uniform> p: Params;

// A group takes a row: the largest numbers, then the sums of exponentials, then the gradient.
@compute @workgroup_size(THREADS)
fn head_loss_taught(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row = group_of(group_id, n_groups);
    if row >= p.n_rows { return; }
    let begin = row * p.n_row;
    let begin_taught = row * p.n_row_taught;
    let at = p.first + row;
    let token = lists[at];
    let id = lists[p.n_all + at];
    let target_logit = logits[begin + id];
    var most = -3.0e38;
    var most_p = -3.0e38;
    var most_q = -3.0e38;
    for (var i = thread; i < p.n_vocab; i += THREADS) {
        most = max(most, logits[begin + i] * p.factor);
    }
    for (var i = thread; i < p.n_common; i += THREADS) {
        most_p = max(most_p, logits[begin + i] * p.of_student);
        most_q = max(most_q, taught[begin_taught + i] * p.of_teacher);
    }
    let top = group_max(thread, most);
    let top_p = group_max(thread, most_p);
    let top_q = group_max(thread, most_q);
    var sum = 0.0;
    var sum_p = 0.0;
    var sum_q = 0.0;
    var dot = 0.0;
    for (var i = thread; i < p.n_vocab; i += THREADS) {
        sum += exp(fma(logits[begin + i], p.factor, -top));
    }
    for (var i = thread; i < p.n_common; i += THREADS) {
        let ln_p = fma(logits[begin + i], p.of_student, -top_p);
        let ln_q = fma(taught[begin_taught + i], p.of_teacher, -top_q);
        let q = exp(ln_q);
        sum_p += exp(ln_p);
        sum_q += q;
        dot += q * (ln_q - ln_p);
    }
    let total = group_sum(thread, sum);
    let total_p = group_sum(thread, sum_p);
    let total_q = group_sum(thread, sum_q);
    let total_dot = group_sum(thread, dot);
    if thread == 0u {
        nll[token] = log(total) - fma(target_logit, p.factor, -top);
        top1[token] = select(0.0, 1.0, target_logit * p.factor >= top);
        kl[token] = total_dot / total_q - log(total_q) + log(total_p);
    }
    if HAS_GRADS == 1u {
        let scale = bitcast<f32>(lists[2u * p.n_all + at]);
        let of_targets = scale * (1.0 - p.share);
        let of_teacher = scale * p.share * p.temperature;
        for (var i = thread; i < p.n_vocab; i += THREADS) {
            let logit = logits[begin + i];
            var dl = exp(fma(logit, p.factor, -top)) * (of_targets / total);
            if i < p.n_common {
                let ln_q = fma(taught[begin_taught + i], p.of_teacher, -top_q);
                dl += exp(fma(logit, p.of_student, -top_p)) * (of_teacher / total_p)
                    - exp(ln_q) * (of_teacher / total_q);
            }
            if i == id { dl -= of_targets; }
            logits[begin + i] = dl;
        }
    }
}
