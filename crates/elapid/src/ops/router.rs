//! Expert routing: which experts each token goes to, and with what weight.
//!
//! For one token with logits `l` over `n_expert` experts:
//!
//! ```text
//! s = softmax(l)           Softmax
//! s = 1 / (1 + e^-l)       Sigmoid
//! s = l                    SoftmaxOfChosen
//!
//! chosen = the n_used experts with the largest s + choice_bias, largest first
//! w = scale s[chosen]                                   Softmax or Sigmoid
//! w = scale s[chosen] / (sum of s[chosen] + 1e-20)      Sigmoid, normalised
//! w = scale softmax(l[chosen])                          Softmax normalised, SoftmaxOfChosen
//! ```
//!
//! Dividing the chosen part of a softmax by its sum is the softmax of the chosen logits, which is
//! how it is computed: it cannot divide zero by zero. Equal values go to the lower index; NaN
//! counts as largest. With groups, experts lie in `n_group` runs of equal length; only the
//! `n_group_used` groups with the largest sum of their two best `s + choice_bias` may be chosen
//! from (DeepSeek-V3). Without bias and groups s has the order of l, so l itself is compared and
//! scores that round to the same number do not tie.
//!
//! Backward, with `g = scale dw` on the chosen, zero elsewhere, and n the normalised weights
//! before `scale`; the choice is constant:
//!
//! ```text
//! dl = p (g - sum of g p)                               Softmax, p over all experts
//! dl = n (g - sum of g n)                               softmax of the chosen
//! dl = ds s (1 - s), ds = g                             Sigmoid
//! dl = ds s (1 - s), ds = (g - sum of g n) / (sum of s + 1e-20)    Sigmoid, normalised
//! ```
//!
//! | name          | shape               |                                                    |
//! |---------------|---------------------|----------------------------------------------------|
//! | `logits`      | (n_tok, n_expert)   |                                                    |
//! | `choice_bias` | (n_expert)          | moves the choice, not the weights; has no gradient |
//! | `weights`     | (n_tok, n_used)     | in order of choice                                 |
//!
//! Kept for backward: the logits and the choice. Not here: the linear map that makes the logits;
//! moving tokens to experts and back (`dispatch`); the balance loss (`balance`); updating
//! `choice_bias`.

use crate::ops::softmax::{Sigmoid, Softmax, SoftmaxBackward, row_threads, sigmoid};
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use crate::tensor::device::Device;
use crate::tensor::gpu::{Kernel, Work, bind};
use std::ops::Range;
use std::sync::Arc;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Score {
    /// A softmax over all experts.
    Softmax,
    /// A sigmoid of each logit.
    Sigmoid,
    /// A softmax over the logits of the chosen experts only.
    SoftmaxOfChosen,
}

/// How tokens are routed.
#[derive(Clone, Debug, PartialEq)]
pub struct Router {
    /// Experts that a token goes to.
    pub n_used: usize,
    pub score: Score,
    /// Whether the weights of a token are divided by their sum. `SoftmaxOfChosen` is so by itself.
    pub normalise: bool,
    /// Factor on the weights.
    pub scale: f32,
    /// Groups of experts; 1 for none.
    pub n_group: usize,
    /// Groups that a token may choose from.
    pub n_group_used: usize,
}

impl Router {
    /// Whether weights are parts of a softmax over all experts, not over the chosen only.
    fn weighs_over_all(&self) -> bool {
        self.score == Score::Softmax && !self.normalise
    }
}

/// Where each token goes. Clones share everything.
///
/// A choice is one (token, slot): number `token * n_used + slot`. Sorted rows are the choices in
/// order of expert, and of token within an expert.
#[derive(Clone)]
pub struct Routing {
    /// The expert of each choice (n_tok * n_used); per token in order of choice.
    #[cfg_attr(not(test), allow(dead_code))] // tests read or write it
    pub experts: Arc<[u32]>,
    /// The weight of each choice (n_tok, n_used).
    pub weights: Var,
    /// The choice that each sorted row holds (n_tok * n_used).
    pub choices: Arc<[u32]>,
    /// The sorted row that holds each choice (n_tok * n_used): the inverse of `choices`.
    pub rows: Arc<[u32]>,
    /// Expert e has the sorted rows `offsets[e]..offsets[e + 1]` (n_expert + 1).
    pub offsets: Arc<[usize]>,
    /// Copies for the kernels of a GPU.
    tables: Option<Arc<Tables>>,
}

/// Lists of a `Routing` on a GPU.
pub(super) struct Tables {
    experts: Tensor,
    pub choices: Tensor,
    pub rows: Tensor,
}

impl Routing {
    pub fn n_tok(&self) -> usize {
        self.weights.value().shape()[0]
    }

    /// Experts that a token goes to.
    pub fn n_used(&self) -> usize {
        self.weights.value().shape()[1]
    }

    pub fn n_expert(&self) -> usize {
        self.offsets.len() - 1
    }

    /// The token in a sorted row.
    pub fn token(&self, row: usize) -> usize {
        self.choices[row] as usize / self.n_used()
    }

    pub(super) fn tables(&self) -> &Tables {
        self.tables.as_ref().expect("a routing of a GPU")
    }

    /// The sorted rows of an expert.
    pub fn rows_of(&self, expert: usize) -> Range<usize> {
        self.offsets[expert]..self.offsets[expert + 1]
    }
}

/// Keeps the sum of sigmoids from being zero, as the reference has it.
const SUM_MIN: f32 = 1e-20;

/// Tokens that a task works on.
pub(super) fn rows_per_task(n_expert: usize) -> usize {
    const LOGITS: usize = 1 << 12;
    (LOGITS / n_expert.max(1)).max(1)
}

/// Chooses the experts of every token.
pub fn route(tape: &Tape, logits: &Var, router: &Router, choice_bias: Option<&Tensor>) -> Routing {
    let (n_tok, n_expert) = logits.value().dims2();
    logits.value().expect_shape("router: logits", &[n_tok, n_expert]);
    let per_group = n_expert / router.n_group.max(1);
    assert!(
        per_group * router.n_group == n_expert
            && router.n_group_used <= router.n_group
            && (1..=router.n_group_used * per_group).contains(&router.n_used),
        "router: {router:?} does not fit {n_expert} experts"
    );
    let device = logits.value().device();
    // The host compares the logits, wherever they are: it alone can say how many rows each expert
    // has. Weights are made where the logits are.
    let host = device.host_device();
    let on_host = |x: &Tensor| Tensor::from_f32(&host, x.shape(), &x.to_vec());
    let bias = choice_bias.map(|bias| {
        bias.expect_shape("router: choice_bias", &[n_expert]);
        on_host(bias)
    });
    let (experts, weights) = match device {
        Device::Cpu(_) => forward(logits.value(), router, bias.as_ref()),
        Device::Gpu(_) => forward(&on_host(logits.value()), router, bias.as_ref()),
    };
    let experts: Arc<[u32]> = experts.into();
    let (choices, rows, offsets) = sort(&experts, n_expert);
    let tables = device.gpu().map(|_| {
        let lists = [&experts, &choices, &rows];
        let [experts, choices, rows] = lists.map(|list| Tensor::from_u32(device, list));
        Arc::new(Tables { experts, choices, rows })
    });
    let weights = match &tables {
        Some(tables) => {
            let mut weights = Tensor::uninit(device, &[n_tok, router.n_used]);
            launch(&FORWARD, router, [logits.value(), &tables.experts], &mut weights);
            weights
        }
        None => weights,
    };
    let kept = (logits.value().clone(), router.clone(), experts.clone(), tables.clone());
    let weights = tape.record("route", &[logits], weights, move |dweights| {
        let (logits, router, experts, tables) = kept;
        let Some(tables) = tables else {
            return vec![Some(backward(&logits, &router, &experts, &dweights))];
        };
        let mut dlogits = Tensor::uninit_as(&logits, logits.shape());
        launch(&BACKWARD, &router, [&logits, &tables.experts, &dweights], &mut dlogits);
        vec![Some(dlogits)]
    });
    Routing { experts, weights, choices, rows, offsets, tables }
}

static FORWARD: Kernel =
    Kernel::new("router_forward", include_str!("router.wgsl"), include_str!("router.cu"));
static BACKWARD: Kernel = Kernel { entry: "router_backward", ..FORWARD };

/// A group of threads for each row of the logits, the first of `ins`.
fn launch<const N: usize>(
    kernel: &'static Kernel,
    router: &Router,
    ins: [&Tensor; N],
    out: &mut Tensor,
) {
    let Some(gpu) = ins[0].device().gpu() else { return };
    let (n_tok, n_expert) = ins[0].dims2();
    let kind = match (router.score, router.normalise) {
        (Score::Softmax, false) => 0,
        (Score::Softmax, true) | (Score::SoftmaxOfChosen, _) => 1,
        (Score::Sigmoid, false) => 2,
        (Score::Sigmoid, true) => 3,
    };
    let consts = [("KIND", kind), ("N_EXPERT", n_expert), ("N_USED", router.n_used)];
    let work = Work::groups(n_tok, row_threads(n_expert));
    let params = [n_tok.into(), router.scale.into()];
    gpu.launch(kernel, work, &consts, &mut bind(ins, [out]), &params);
}

/// Experts and weights of all choices.
fn forward(logits: &Tensor, router: &Router, bias: Option<&Tensor>) -> (Vec<u32>, Tensor) {
    let cpu = logits.device().expect_cpu();
    let ((n_tok, n_expert), n_used) = (logits.dims2(), router.n_used);
    let mut experts = vec![0; n_tok * n_used];
    let mut weights = Tensor::uninit(logits.device(), &[n_tok, n_used]);
    let len = rows_per_task(n_expert);
    let pieces = experts.chunks_mut(len * n_used).zip(weights.f32_mut().chunks_mut(len * n_used));
    cpu.map(pieces.enumerate().collect(), |(idx, (experts, weights))| {
        let mut scores = vec![0.0; n_expert];
        let logits = logits.f32()[idx * len * n_expert..].chunks_exact(n_expert);
        let choices = experts.chunks_exact_mut(n_used).zip(weights.chunks_exact_mut(n_used));
        for (logits, (chosen, weights)) in logits.zip(choices) {
            let softmax = |y: &mut [f32]| cpu.simd(Softmax { x: logits, y });
            if bias.is_none() && router.n_group == 1 {
                best(logits, 0..n_expert, chosen);
            } else {
                match router.score {
                    Score::Softmax => softmax(&mut scores),
                    Score::Sigmoid => cpu.simd(Sigmoid { x: logits, y: &mut scores }),
                    Score::SoftmaxOfChosen => scores.copy_from_slice(logits),
                }
                if let Some(bias) = bias {
                    scores.iter_mut().zip(bias.f32()).for_each(|(score, bias)| *score += bias);
                }
                choose(&scores, router, chosen);
            }
            if router.weighs_over_all() {
                softmax(&mut scores);
                gather(&scores, chosen, weights);
            } else {
                gather(logits, chosen, weights);
                weigh(router, weights);
            }
            weights.iter_mut().for_each(|weight| *weight *= router.scale);
        }
    });
    (experts, weights)
}

/// Inverts `forward`: the gradient of the logits.
fn backward(logits: &Tensor, router: &Router, experts: &[u32], dweights: &Tensor) -> Tensor {
    let cpu = logits.device().expect_cpu();
    let ((_, n_expert), n_used) = (logits.dims2(), router.n_used);
    let mut dlogits = Tensor::uninit(logits.device(), logits.shape());
    let len = rows_per_task(n_expert);
    cpu.each_piece(dlogits.f32_mut(), len * n_expert, |idx, dlogits| {
        let logits = &logits.f32()[idx * len * n_expert..][..dlogits.len()];
        let mut g_all = vec![0.0; n_expert];
        let (mut g, mut l, mut n) = (vec![0.0; n_used], vec![0.0; n_used], vec![0.0; n_used]);
        for row in 0..dlogits.len() / n_expert {
            let choices = (idx * len + row) * n_used..(idx * len + row + 1) * n_used;
            let chosen = &experts[choices.clone()];
            g.copy_from_slice(&dweights.f32()[choices]);
            g.iter_mut().for_each(|g| *g *= router.scale);
            let x = &logits[row * n_expert..][..n_expert];
            let dx = &mut dlogits[row * n_expert..][..n_expert];
            if router.weighs_over_all() {
                scatter(&g, chosen, &mut g_all);
                cpu.simd(SoftmaxBackward { x, g: &g_all, scale: 1.0, dx });
            } else {
                gather(x, chosen, &mut l);
                n.copy_from_slice(&l);
                weigh(router, &mut n);
                weigh_backward(router, &l, &n, &mut g);
                scatter(&g, chosen, dx);
            }
        }
    });
    dlogits
}

/// Logits of the chosen become their weights, before `scale`.
fn weigh(router: &Router, chosen: &mut [f32]) {
    match (router.score, router.normalise) {
        (Score::Sigmoid, normalise) => {
            chosen.iter_mut().for_each(|x| *x = sigmoid(*x));
            if normalise {
                let sum = chosen.iter().sum::<f32>() + SUM_MIN;
                chosen.iter_mut().for_each(|s| *s /= sum);
            }
        }
        (Score::Softmax | Score::SoftmaxOfChosen, _) => {
            // Not always the first: a bias may have chosen.
            let largest = chosen.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            chosen.iter_mut().for_each(|x| *x = (*x - largest).exp());
            let sum = chosen.iter().sum::<f32>();
            chosen.iter_mut().for_each(|e| *e /= sum);
        }
    }
}

/// Inverts `weigh`: `g` of its results `n` becomes the gradient of the logits `l`.
fn weigh_backward(router: &Router, l: &[f32], n: &[f32], g: &mut [f32]) {
    let mean = g.iter().zip(n).map(|(g, n)| g * n).sum::<f32>();
    match (router.score, router.normalise) {
        (Score::Sigmoid, normalise) => {
            let sum = l.iter().map(|l| sigmoid(*l)).sum::<f32>() + SUM_MIN;
            for (g, l) in g.iter_mut().zip(l) {
                let ds = if normalise { (*g - mean) / sum } else { *g };
                *g = ds * (sigmoid(*l) * sigmoid(-l));
            }
        }
        (Score::Softmax | Score::SoftmaxOfChosen, _) => {
            g.iter_mut().zip(n).for_each(|(g, n)| *g = n * (*g - mean));
        }
    }
}

fn gather(x: &[f32], chosen: &[u32], y: &mut [f32]) {
    chosen.iter().zip(y).for_each(|(&expert, y)| *y = x[expert as usize]);
}

/// The inverse of `gather`; zero elsewhere.
fn scatter(x: &[f32], chosen: &[u32], y: &mut [f32]) {
    y.fill(0.0);
    chosen.iter().zip(x).for_each(|(&expert, x)| y[expert as usize] = *x);
}

/// Fills `chosen` with the best experts, from the best groups only.
fn choose(scores: &[f32], router: &Router, chosen: &mut [u32]) {
    if router.n_group == 1 {
        return best(scores, 0..scores.len(), chosen);
    }
    let per_group = scores.len() / router.n_group;
    let mut two = [0; 2];
    let two = &mut two[..per_group.min(2)];
    let group_scores: Vec<f32> = (0..router.n_group)
        .map(|group| {
            best(scores, group * per_group..(group + 1) * per_group, two);
            two.iter().map(|&expert| scores[expert as usize]).sum()
        })
        .collect();
    let mut groups = vec![0; router.n_group_used];
    best(&group_scores, 0..router.n_group, &mut groups);
    groups.sort_unstable();
    let candidates = groups.iter().flat_map(|&group| {
        let first = group as usize * per_group;
        first..first + per_group
    });
    best(scores, candidates, chosen);
}

/// Fills `chosen` with the candidates of the largest scores, largest first.
///
/// Candidates come in ascending order, and a later one must be larger to pass an earlier one.
/// `chosen` is short, so inserting is cheaper than sorting.
#[inline]
fn best(scores: &[f32], candidates: impl Iterator<Item = usize>, chosen: &mut [u32]) {
    let mut n = 0;
    for candidate in candidates {
        let passes = |other: u32| is_larger(scores[candidate], scores[other as usize]);
        if n < chosen.len() {
            n += 1;
        } else if !passes(chosen[n - 1]) {
            continue;
        }
        let mut at = n - 1;
        while at > 0 && passes(chosen[at - 1]) {
            chosen[at] = chosen[at - 1];
            at -= 1;
        }
        chosen[at] = candidate as u32;
    }
    assert_eq!(n, chosen.len(), "router: fewer candidates than choices");
}

/// NaN is larger than everything else: an expert that is broken is chosen, and is seen.
#[inline]
fn is_larger(a: f32, b: f32) -> bool {
    a > b || (a.is_nan() && !b.is_nan())
}

type Sorted = (Arc<[u32]>, Arc<[u32]>, Arc<[usize]>);

/// Counts, then places each choice: (`choices`, `rows`, `offsets`) of `Routing`.
fn sort(experts: &[u32], n_expert: usize) -> Sorted {
    assert!(u32::try_from(experts.len()).is_ok(), "router: {} choices", experts.len());
    let mut offsets = vec![0; n_expert + 1];
    for &expert in experts {
        offsets[expert as usize + 1] += 1;
    }
    for expert in 0..n_expert {
        offsets[expert + 1] += offsets[expert];
    }
    let mut next = offsets.clone();
    let mut choices = vec![0; experts.len()];
    let mut rows = vec![0; experts.len()];
    for (choice, &expert) in experts.iter().enumerate() {
        let row = next[expert as usize];
        next[expert as usize] += 1;
        choices[row] = choice as u32;
        rows[choice] = row as u32;
    }
    (choices.into(), rows.into(), offsets.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::add::add;
    use crate::ops::check::{Input, check_gradients, compare_devices, devices};
    use crate::tape::Gradients;
    use crate::tensor::rng::Rng;
    use std::cell::RefCell;

    fn router(n_used: usize, score: Score, normalise: bool) -> Router {
        Router { n_used, score, normalise, scale: 1.0, n_group: 1, n_group_used: 1 }
    }

    /// Every kind of score, plain and normalised.
    fn routers(n_used: usize) -> Vec<Router> {
        let scores = [Score::Softmax, Score::Sigmoid, Score::SoftmaxOfChosen];
        let each = |score| [false, true].map(|normalise| router(n_used, score, normalise));
        scores.into_iter().flat_map(each).collect()
    }

    /// Numbers 0.4 apart within each row, in a random order: moving one a little flips no choice.
    fn ladder(n_tok: usize, n_expert: usize) -> Vec<f32> {
        let rng = Rng::new(5, 0x1ADD);
        let mut data = Vec::new();
        for tok in 0..n_tok {
            let mut order: Vec<usize> = (0..n_expert).collect();
            order.sort_by_key(|n| rng.bits((tok * n_expert + n) as u64));
            data.extend(order.iter().map(|&rung| (rung as f32 - n_expert as f32 / 2.0) * 0.4));
        }
        data
    }

    /// Checks the gradients, and that every difference was taken with the same choice.
    fn check(router: &Router, n_tok: usize, n_expert: usize, bias: Option<&[f32]>) {
        let ladder = ladder(n_tok, n_expert);
        let experts: RefCell<Option<Arc<[u32]>>> = RefCell::default();
        check_gradients(&[Input::normal(1, &[n_tok, n_expert], 0.02)], |tape, v| {
            let device = v[0].value().device();
            let bias = bias.map(|bias| Tensor::from_f32(device, &[n_expert], bias));
            let ladder = Var::constant(Tensor::from_f32(device, v[0].value().shape(), &ladder));
            let routing = route(tape, &add(tape, &ladder, &v[0]), router, bias.as_ref());
            let before = experts.borrow_mut().get_or_insert(routing.experts.clone()).clone();
            assert!(before == routing.experts, "a choice flipped");
            vec![routing.weights]
        });
    }

    #[test]
    fn gradients() {
        for n_used in [1, 3] {
            for mut router in routers(n_used) {
                check(&router, 1, n_used, None); // no choice
                check(&router, 5, 7, None); // shorter than a vector
                router.scale = -1.7;
                check(&router, 3, 37, None); // a vector and a rest
                check(&router, 131, 64, None); // several tasks, the last one shorter
            }
        }
    }

    /// Biases so far apart that they alone choose, whatever the logits.
    #[test]
    fn gradients_with_groups_and_a_bias() {
        let bias: Vec<f32> = (0..12).map(|n| (1 << (n * 5 % 12)) as f32 * 4.0).collect();
        for mut router in routers(4) {
            router.scale = 2.5;
            check(&router, 6, 12, Some(&bias));
            (router.n_group, router.n_group_used) = (4, 2);
            check(&router, 6, 12, Some(&bias));
        }
    }

    /// What `route` must give for one token, in f64 and by sorting.
    fn slow(router: &Router, l: &[f64], bias: &[f64]) -> (Vec<u32>, Vec<f64>) {
        let exp_sum: f64 = l.iter().map(|l| l.exp()).sum();
        let score = |e: usize| match router.score {
            Score::Softmax => l[e].exp() / exp_sum,
            Score::Sigmoid => 1.0 / (1.0 + (-l[e]).exp()),
            Score::SoftmaxOfChosen => l[e],
        };
        let sorted = |mut list: Vec<usize>, key: &dyn Fn(usize) -> f64| {
            list.sort_by(|&a, &b| key(b).total_cmp(&key(a)).then(a.cmp(&b)));
            list
        };
        let key = |e: usize| score(e) + bias[e];
        let per_group = l.len() / router.n_group;
        let members = |g: usize| sorted((g * per_group..(g + 1) * per_group).collect(), &key);
        let group_key = |g: usize| members(g).iter().take(2).map(|&e| key(e)).sum();
        let groups = sorted((0..router.n_group).collect(), &group_key);
        let kept = groups[..router.n_group_used].iter().flat_map(|&g| members(g)).collect();
        let chosen = sorted(kept, &key)[..router.n_used].to_vec();
        let mut w: Vec<f64> = chosen.iter().map(|&e| score(e)).collect();
        if router.score == Score::SoftmaxOfChosen {
            w.iter_mut().for_each(|w| *w = w.exp());
        }
        if router.normalise || router.score == Score::SoftmaxOfChosen {
            let sum: f64 = w.iter().sum();
            w.iter_mut().for_each(|w| *w /= sum);
        }
        w.iter_mut().for_each(|w| *w *= router.scale as f64);
        (chosen.into_iter().map(|e| e as u32).collect(), w)
    }

    #[test]
    fn routing_agrees_with_sorting_in_f64() {
        let device = Device::cpu(2).unwrap();
        let (n_tok, n_expert) = (300, 24);
        let logits = Input::normal(3, &[n_tok, n_expert], 2.0).tensor(&device);
        let bias = Input::normal(4, &[n_expert], 0.3).tensor(&device);
        let wide = |x: &[f32]| x.iter().map(|x| *x as f64).collect::<Vec<_>>();
        for bias in [None, Some(&bias)] {
            for (n_group, n_group_used) in [(1, 1), (4, 2), (24, 7), (6, 6)] {
                for router in routers(5) {
                    let router = Router { n_group, n_group_used, scale: 1.5, ..router };
                    let logits_var = Var::constant(logits.clone());
                    let routing = route(&Tape::off(), &logits_var, &router, bias);
                    let bias = bias.map_or(vec![0.0; n_expert], |bias| wide(bias.f32()));
                    for tok in 0..n_tok {
                        let row = &logits.f32()[tok * n_expert..][..n_expert];
                        let (experts, weights) = slow(&router, &wide(row), &bias);
                        let choices = tok * 5..tok * 5 + 5;
                        assert_eq!(routing.experts[choices.clone()], experts, "{router:?}");
                        let got = &routing.weights.value().f32()[choices];
                        for (got, want) in got.iter().zip(weights) {
                            assert!((*got as f64 - want).abs() < 1e-6, "{got} {want} {router:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn the_choice_is_the_same_on_every_device() {
        let (n_tok, n_expert) = (70, 24);
        let (logits, bias) =
            (Input::normal(3, &[n_tok, n_expert], 2.0), Input::normal(4, &[n_expert], 0.3));
        for router in routers(5) {
            let router = Router { n_group: 4, n_group_used: 2, scale: 1.5, ..router };
            let run = |device: &Device| {
                let (logits, bias) = (logits.tensor(device), bias.tensor(device));
                route(&Tape::off(), &Var::constant(logits), &router, Some(&bias))
            };
            let want = run(&Device::cpu(1).unwrap());
            for (device, tolerance) in devices() {
                let got = run(device);
                assert!(got.experts == want.experts && got.rows == want.rows, "{device:?}");
                let [want, got] = [&want, &got].map(|it| it.weights.value().to_vec());
                compare_devices(&format!("{device:?}: {router:?}"), &want, &got, *tolerance);
            }
        }
    }

    /// Experts and weights by the classes of OLMoE, Mixtral, GraniteMoeHybrid and dots1; those
    /// of dots1, which leaves them in no order, put in order.
    #[test]
    fn routing_agrees_with_transformers() {
        let device = Device::cpu(1).unwrap();
        let l: Vec<f32> = (0..24).map(|i| ((i * 37 + 11) % 64) as f32 / 8.0 - 4.0).collect();
        let b: Vec<f32> = (0..8).map(|i| ((i * 5) % 8) as f32 / 16.0).collect();
        let logits = Var::constant(Tensor::from_f32(&device, &[3, 8], &l));
        let bias = Tensor::from_f32(&device, &[8], &b);
        let expect = |router: &Router, bias, experts: [u32; 9], weights: [f32; 9]| {
            let routing = route(&Tape::off(), &logits, router, bias);
            assert_eq!(routing.experts[..], experts);
            for (got, want) in routing.weights.value().f32().iter().zip(weights) {
                assert!((got - want).abs() < 1e-6, "{got} {want} {router:?}");
            }
        };
        let olmoe = router(3, Score::Softmax, false);
        let by_logit = [3, 1, 6, 2, 7, 0, 6, 4, 2];
        let plain = [
            0.6858589, 0.1965019, 0.08191416, 0.5341654, 0.2226733, 0.153041, 0.6945685, 0.1989972,
            0.05701366,
        ];
        let normalised = [
            0.711269, 0.203782, 0.08494897, 0.5870726, 0.2447283, 0.1681991, 0.7306792, 0.2093431,
            0.0599778,
        ];
        expect(&olmoe, None, by_logit, plain);
        expect(&router(3, Score::Softmax, true), None, by_logit, normalised);
        expect(&router(3, Score::SoftmaxOfChosen, false), None, by_logit, normalised);
        let dots1 = Router { scale: 2.5, ..router(3, Score::Sigmoid, true) };
        let ungrouped = [
            0.9262225, 0.8474466, 0.7263309, 0.9489732, 0.9834315, 0.5675954, 0.9670789, 0.8753328,
            0.657588,
        ];
        expect(&dots1, Some(&bias), [3, 1, 6, 7, 2, 3, 6, 4, 2], ungrouped);
        let dots1 = Router { n_group: 4, n_group_used: 2, normalise: false, ..dots1 };
        let grouped = [
            2.406683, 1.887288, 0.5045331, 2.349783, 2.435107, 1.405441, 2.394781, 2.167589,
            1.094559,
        ];
        expect(&dots1, Some(&bias), [3, 6, 2, 7, 2, 3, 6, 4, 7], grouped);
    }

    #[test]
    fn sorted_rows_go_by_expert_then_by_token() {
        let device = Device::cpu(1).unwrap();
        let logits = Var::constant(Input::normal(9, &[50, 9], 1.0).tensor(&device));
        let routing = route(&Tape::off(), &logits, &router(2, Score::Softmax, true), None);
        let mut pairs = Vec::new();
        for expert in 0..9 {
            for row in routing.rows_of(expert) {
                let choice = routing.choices[row] as usize;
                assert_eq!(routing.experts[choice], expert as u32);
                assert_eq!((routing.rows[choice] as usize, routing.token(row)), (row, choice / 2));
                pairs.push((expert, routing.token(row)));
            }
        }
        assert_eq!(pairs.len(), 100);
        assert!(pairs.is_sorted_by(|a, b| a < b));
        assert_eq!((routing.n_tok(), routing.n_used(), routing.n_expert()), (50, 2, 9));
    }

    #[test]
    fn ties_go_to_the_lower_index_and_nan_is_largest() {
        let device = Device::cpu(1).unwrap();
        let nan = f32::NAN;
        let rows: [([f32; 4], [u32; 3]); 4] = [
            ([1.0, 1.0, 1.0, 1.0], [0, 1, 2]),
            ([0.0, 2.0, 1.0, 2.0], [1, 3, 2]),
            ([nan, -5.0, f32::NEG_INFINITY, nan], [0, 3, 1]),
            ([nan, nan, nan, nan], [0, 1, 2]),
        ];
        for (logits, want) in rows {
            let logits = Var::constant(Tensor::from_f32(&device, &[1, 4], &logits));
            for router in routers(3) {
                let routing = route(&Tape::off(), &logits, &router, None);
                assert_eq!(routing.experts[..], want, "{router:?}");
                let router = Router { n_group: 2, n_group_used: 2, ..router };
                let bias = Tensor::zeros(&device, &[4]);
                route(&Tape::off(), &logits, &router, Some(&bias));
            }
        }
    }

    #[test]
    fn large_logits_give_finite_weights_and_gradients() {
        large_logits_are_finite(&Device::cpu(1).unwrap());
        devices().iter().for_each(|(device, _)| large_logits_are_finite(device));
    }

    fn large_logits_are_finite(device: &Device) {
        let data = [-200.0, -300.0, -250.0, -900.0, 200.0, -300.0, 3000.0, 100.0];
        let value = Tensor::from_f32(device, &[2, 4], &data);
        for router in routers(2) {
            let tape = Tape::new();
            let logits = tape.leaf(0, &value);
            let routing = route(&tape, &logits, &router, None);
            let weights = routing.weights.value().to_vec();
            assert!(
                weights.iter().all(|w| (0.0..=1.000_001).contains(w)),
                "{device:?} {weights:?}"
            );
            let seed = Tensor::from_f32(device, &[2, 2], &[1.0, 2.0, 3.0, 4.0]);
            let mut grads = Gradients::default();
            tape.walk(vec![(routing.weights, seed)], &mut grads);
            let grad = grads.get(0).unwrap().to_vec();
            assert!(grad.iter().all(|g| g.is_finite()), "{device:?} {router:?}");
        }
    }
}
