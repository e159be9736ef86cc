// Cross-entropy on rows of logits, and what belongs to it; see head_loss.rs.
// HAS_GRADS: logits become their gradient. IN_PLACE is for CUDA; here they always do so in place.

// Four lists of n_all: tokens that are learned, their targets, factors of gradients, weights.
@group(0) @binding(0) var<storage, read> lists: array<u32>;
@group(0) @binding(1) var<storage, read_write> logits: array<f32>; // (n_rows, n_vocab)
@group(0) @binding(2) var<storage, read_write> unused: array<f32>; // (1)
@group(0) @binding(3) var<storage, read_write> nll: array<f32>; // (n_tok)
@group(0) @binding(4) var<storage, read_write> top1: array<f32>; // (n_tok)
// Row 0 of the logits is number `first` of the lists; `n_row` is `n_vocab` but on CUDA.
struct RowParams { n_rows: u32, n_vocab: u32, first: u32, n_all: u32, factor: f32, n_row: u32 }
@group(0) @binding(5) var<uniform> p_rows: RowParams;

// A group takes a row: its largest number and the sum of exponentials in one pass, which is made
// larger anew wherever a thread meets a larger number. Exponents are made by `fma` everywhere: were
// only some rounded on the way, a probability of one would be off by the last bits of a large
// logit.
@compute @workgroup_size(THREADS)
fn head_loss_rows(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row = group_of(group_id, n_groups);
    if row >= p_rows.n_rows { return; }
    let n = p_rows.n_vocab;
    let begin = row * n;
    let at = p_rows.first + row;
    let token = lists[at];
    let id = lists[p_rows.n_all + at];
    let factor = p_rows.factor;
    let target_logit = logits[begin + id];
    var largest = -3.0e38;
    var sum = 0.0;
    for (var i = thread; i < n; i += THREADS) {
        let logit = logits[begin + i];
        let l = logit * factor;
        if l > largest {
            sum *= exp(largest - l);
            largest = l;
        }
        sum += exp(fma(logit, factor, -largest));
    }
    let top = group_max(thread, largest);
    let total = group_sum(thread, sum * exp(largest - top));
    if thread == 0u {
        nll[token] = log(total) - fma(target_logit, factor, -top);
        top1[token] = select(0.0, 1.0, target_logit * factor >= top);
    }
    if HAS_GRADS == 1u {
        let scale = bitcast<f32>(lists[2u * p_rows.n_all + at]);
        let over = scale / total;
        for (var i = thread; i < n; i += THREADS) {
            var dl = exp(fma(logits[begin + i], factor, -top)) * over;
            if i == id { dl -= scale; }
            logits[begin + i] = dl;
        }
    }
}

@group(0) @binding(1) var<storage, read> nll_in: array<f32>; // (n_tok)
@group(0) @binding(2) var<storage, read_write> loss: array<f32>; // (1)
struct SumParams { n: u32, norm: f32 }
@group(0) @binding(3) var<uniform> p_sum: SumParams;

// The weighted mean of n tokens, by one group: each thread its own in order, then the threads.
@compute @workgroup_size(THREADS)
fn head_loss_sum(@builtin(local_invocation_index) thread: u32) {
    var sum = 0.0;
    for (var i = thread; i < p_sum.n; i += THREADS) {
        sum += nll_in[lists[i]] * bitcast<f32>(lists[3u * p_sum.n + i]);
    }
    let total = group_sum(thread, sum);
    if thread == 0u { loss[0] = total / p_sum.norm; }
}

@group(0) @binding(1) var<storage, read> part: array<f32>; // (rows, d)
@group(0) @binding(2) var<storage, read_write> dx: array<f32>; // (n_tok, d)
struct ScatterParams { n: u32, d: u32, first: u32 }
@group(0) @binding(3) var<uniform> p_scatter: ScatterParams;

// Rows to where their tokens are.
@compute @workgroup_size(THREADS)
fn head_loss_scatter(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
) {
    for (var i = id.x; i < p_scatter.n; i += n_groups.x * THREADS) {
        let token = lists[p_scatter.first + i / p_scatter.d];
        dx[token * p_scatter.d + i % p_scatter.d] = part[i];
    }
}

@group(0) @binding(0) var<storage, read> dloss: array<f32>; // (1)
@group(0) @binding(1) var<storage, read_write> grad: array<f32>; // (n)
struct ScaleParams { n: u32 }
@group(0) @binding(2) var<uniform> p_scale: ScaleParams;

@compute @workgroup_size(THREADS)
fn head_loss_scale(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
) {
    if dloss[0] == 1.0 { return; }
    for (var i = id.x; i < p_scale.n; i += n_groups.x * THREADS) {
        grad[i] *= dloss[0];
    }
}
