//! What would be inserted in a hole of a file: the request that is made of it, and the lines of the
//! answer that are taken. `complete` and `lsp` share it, so that both insert the same.

use super::ending::Ending;
use super::hole::{Hole, Laid};
use crate::report::Done;
use elapid::{Generator, Request, Sampling, Special};
use std::ops::ControlFlow;
use std::time::Duration;

/// Lines where nobody says.
pub const N_LINES: usize = 12;
/// Tokens of a line, at most, on average.
const N_TOK_PER_LINE: usize = 64;

/// The prompt of a hole. A model that has no tokens for holes continues the text before it.
pub fn prompt(loaded: &Generator, hole: &Hole<'_>) -> Done<Laid> {
    let n_ctx = loaded.engine.settings().context;
    if let Some(fim) = &loaded.fim {
        return Ok(hole.prompt(loaded.engine.tokenizer(), fim, n_ctx)?);
    }
    let ids = loaded.prompt(hole.prefix, Special::Plain)?;
    let n_cut = ids.len().saturating_sub(n_ctx / 8 * 7);
    Ok(Laid { ids: ids[n_cut..].to_vec(), is_cut: n_cut > 0, shown: Vec::new() })
}

/// The greedy request for a prompt.
pub fn request(loaded: &Generator, laid: &Laid, n_lines: usize) -> Request {
    let n_left = loaded.engine.settings().context.saturating_sub(laid.ids.len());
    let stops_of_fim = loaded.fim.as_ref().map(|fim| fim.stops()).unwrap_or_default();
    Request {
        n_max: n_left.min(n_lines * N_TOK_PER_LINE),
        sampling: Sampling::greedy(),
        stop_tokens: [loaded.stops(), stops_of_fim].concat(),
        ..loaded.request(laid.ids.clone())
    }
}

/// The lines of an answer, as its tokens come.
pub struct Lines {
    pub text: String,
    ending: Ending,
    n_left: usize,
}

impl Lines {
    /// At most `n_lines` between two texts.
    pub fn between(loaded: &Generator, [prefix, suffix]: [&str; 2], n_lines: usize) -> Lines {
        let suffix = if loaded.fim.is_some() { suffix } else { "" };
        let ending = Ending::between(prefix, suffix);
        Lines { text: String::new(), ending, n_left: n_lines }
    }

    /// Takes the text of a token: what of it is inserted now, and whether more may come.
    pub fn push(&mut self, text: &str) -> (String, ControlFlow<()>) {
        let (given, stop) = self.ending.push(text, Duration::ZERO);
        let (taken, flow) = self.take(&given);
        (taken, if stop.is_some() { ControlFlow::Break(()) } else { flow })
    }

    /// Takes the last text of an answer that the model ended: what of it is inserted.
    pub fn finish(&mut self, text: &str) -> String {
        let (given, _) = self.ending.finish(text);
        self.take(&given).0
    }

    fn take(&mut self, given: &str) -> (String, ControlFlow<()>) {
        let (begin, mut flow) = (self.text.len(), ControlFlow::Continue(()));
        for piece in given.split_inclusive('\n') {
            let is_whole = piece.ends_with('\n');
            if is_whole && self.n_left <= 1 {
                // The break after the last line is not part of it.
                self.text.push_str(piece.trim_end_matches(['\n', '\r']));
                flow = ControlFlow::Break(());
                break;
            }
            self.text.push_str(piece);
            self.n_left -= usize::from(is_whole);
        }
        (self.text[begin..].to_string(), flow)
    }
}
