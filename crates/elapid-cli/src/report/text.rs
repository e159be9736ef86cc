//! Numbers and text as people read them.

/// Text in which nothing is hidden: samples come from a model and may hold any bytes. Characters
/// that nobody sees, or that turn the text around them, are shown by number.
pub fn visible(text: &str) -> String {
    let shown = |c: char| match c {
        '\n' | '\t' => c.to_string(),
        _ if is_unseen(c) => format!("[U+{:04X}]", c as u32),
        _ => c.to_string(),
    };
    text.chars().map(shown).collect()
}

/// Control characters, marks that change the direction of text, odd line ends, and
/// characters of no width.
fn is_unseen(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}')
        || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
        || matches!(c, '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e0fff}')
}

/// The text, or its first `n` characters and `more` where it is longer.
pub fn shortened(text: &str, n: usize, more: &str) -> String {
    match text.char_indices().nth(n) {
        Some((end, _)) => format!("{}{more}", &text[..end]),
        None => text.to_string(),
    }
}

/// 12 345 678, with spaces that do not break.
pub fn grouped(n: u64) -> String {
    match n {
        0..1000 => n.to_string(),
        _ => format!("{}\u{202f}{:03}", grouped(n / 1000), n % 1000),
    }
}

/// 21.4 M, 31.0 k, 1200.
pub fn count(n: f64) -> String {
    match n {
        n if n >= 1e9 => format!("{:.2} G", n / 1e9),
        n if n >= 1e6 => format!("{:.1} M", n / 1e6),
        n if n >= 1e4 => format!("{:.1} k", n / 1e3),
        n => format!("{n:.0}"),
    }
}

pub fn mebibytes(n: f64) -> String {
    format!("{:.1} MiB", n / (1 << 20) as f64)
}

/// 812 B, 3.1 KiB, 21.4 MiB, 1.25 GiB.
pub fn bytes(n: f64) -> String {
    match n.abs() {
        abs if abs >= (1u64 << 30) as f64 => format!("{:.2} GiB", n / (1u64 << 30) as f64),
        abs if abs >= (1 << 20) as f64 => format!("{:.1} MiB", n / (1 << 20) as f64),
        abs if abs >= (1 << 10) as f64 => format!("{:.1} KiB", n / (1 << 10) as f64),
        _ => format!("{n:.0} B"),
    }
}

/// 0.8 s, 45 s, 13 m, 2 h 05 m, 3 d 4 h.
pub fn duration(seconds: f64) -> String {
    if !seconds.is_finite() || seconds < 0.0 {
        return "?".to_string();
    }
    let (whole, minutes) = (seconds.round() as u64, (seconds / 60.0).round() as u64);
    match seconds {
        s if s < 9.95 => format!("{s:.1} s"),
        s if s < 89.5 => format!("{whole} s"),
        s if s < 89.5 * 60.0 => format!("{minutes} m"),
        s if s < 47.5 * 3600.0 => format!("{} h {:02} m", minutes / 60, minutes % 60),
        _ => format!("{} d {} h", minutes / 1440, minutes % 1440 / 60),
    }
}

/// 4 m 51 s: a time that is over, to the second.
pub fn duration_exact(seconds: f64) -> String {
    match seconds.round() as u64 {
        s @ 60..3600 if seconds >= 60.0 => format!("{} m {:02} s", s / 60, s % 60),
        s @ 3600.. if seconds.is_finite() => format!("{} h {:02} m", s / 3600, s % 3600 / 60),
        _ => duration(seconds),
    }
}

/// 812, 4.9 k, 21.4 k, 1.3 M.
pub fn rate(n: f64) -> String {
    match n {
        n if n >= 999_950.0 => format!("{:.1} M", n / 1e6),
        n if n >= 1e3 => format!("{:.1} k", n / 1e3),
        n if n >= 9.95 => format!("{n:.0}"),
        n => format!("{n:.1}"),
    }
}

/// What is to be known of a context that is longer than what a model was trained on.
pub fn beyond_trained(context: usize, n_ctx: Option<usize>) -> Option<String> {
    let n_ctx = n_ctx.filter(|n_ctx| context > *n_ctx)?;
    Some(format!(
        "context {context}, but the model was trained on {n_ctx} tokens: what is further back may \
         be of little use to it"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_seen_is_shown() {
        assert_eq!(visible("\0\x1b[31m\r\n\x7f"), "[U+0000][U+001B][31m[U+000D]\n[U+007F]");
        assert_eq!(visible("a\u{202e}b\u{85}c\u{feff}"), "a[U+202E]b[U+0085]c[U+FEFF]");
        assert_eq!(visible("fn é() {\n\tα\n}"), "fn é() {\n\tα\n}");
    }

    #[test]
    fn numbers_read_well() {
        assert_eq!([grouped(0), grouped(999), grouped(1000)], ["0", "999", "1\u{202f}000"]);
        assert_eq!(grouped(12_345_678), "12\u{202f}345\u{202f}678");
        let list = [0.0, 0.84, 45.4, 800.0, 7500.0, 90000.0, 3e5];
        let want = ["0.0 s", "0.8 s", "45 s", "13 m", "2 h 05 m", "25 h 00 m", "3 d 11 h"];
        assert_eq!(list.map(duration), want);
        assert_eq!([f64::NAN, f64::INFINITY, -1.0].map(duration), ["?"; 3]);
        let list = [12.0, 291.4, 3599.9, 7265.0];
        assert_eq!(list.map(duration_exact), ["12 s", "4 m 51 s", "1 h 00 m", "2 h 01 m"]);
        let list = [3.25, 812.0, 4912.0, 999_999.0];
        assert_eq!(list.map(rate), ["3.2", "812", "4.9 k", "1.0 M"]);
        let list = [0.0, 1023.0, 1024.0, 22_400_000.0, 1.4e9];
        assert_eq!(list.map(bytes), ["0 B", "1023 B", "1.0 KiB", "21.4 MiB", "1.30 GiB"]);
    }

    #[test]
    fn a_cut_falls_between_characters() {
        assert_eq!([shortened("äöü", 2, "…"), shortened("äöü", 3, "…")], ["äö…", "äöü"]);
    }
}
