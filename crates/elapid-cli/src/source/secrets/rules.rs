//! What secrets look like, and what only looks like them.

/// A token that begins with letters of its own.
pub struct Token {
    pub prefix: &'static str,
    pub kind: &'static str,
    pub is_letter: fn(u8) -> bool,
    /// Letters after the prefix.
    pub n_min: usize,
    pub n_max: usize,
    /// Whether nothing else begins so.
    pub is_sure: bool,
}

const fn sure(prefix: &'static str, kind: &'static str, n_min: usize, n_max: usize) -> Token {
    Token { prefix, kind, is_letter: is_code, n_min, n_max, is_sure: true }
}

fn is_code(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"_-".contains(&byte)
}

fn is_capital(byte: u8) -> bool {
    byte.is_ascii_uppercase() || byte.is_ascii_digit()
}

fn is_path(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'/'
}

fn is_dotted(byte: u8) -> bool {
    is_code(byte) || byte == b'.'
}

pub const TOKENS: [Token; 37] = [
    Token { is_letter: is_capital, ..sure("AKIA", "AWS access key", 16, 16) },
    Token { is_letter: is_capital, ..sure("ASIA", "AWS access key", 16, 16) },
    sure("ghp_", "GitHub token", 36, 255),
    sure("gho_", "GitHub token", 36, 255),
    sure("ghu_", "GitHub token", 36, 255),
    sure("ghs_", "GitHub token", 36, 255),
    sure("ghr_", "GitHub token", 36, 255),
    sure("github_pat_", "GitHub token", 40, 255),
    sure("glpat-", "GitLab token", 20, 64),
    sure("gldt-", "GitLab token", 20, 64),
    sure("glptt-", "GitLab token", 20, 64),
    sure("glrt-", "GitLab token", 20, 64),
    sure("xoxb-", "Slack token", 20, 255),
    sure("xoxp-", "Slack token", 20, 255),
    sure("xoxa-", "Slack token", 20, 255),
    sure("xoxr-", "Slack token", 20, 255),
    sure("xoxs-", "Slack token", 20, 255),
    sure("xapp-", "Slack token", 20, 255),
    Token { is_letter: is_path, ..sure("hooks.slack.com/services/", "Slack webhook", 30, 90) },
    sure("AIza", "Google API key", 35, 35),
    sure("GOCSPX-", "Google client secret", 24, 40),
    Token { is_letter: is_dotted, ..sure("ya29.", "Google access token", 40, 512) },
    sure("sk_live_", "Stripe key", 20, 128),
    sure("rk_live_", "Stripe key", 20, 128),
    sure("sk_test_", "Stripe key", 20, 128),
    sure("whsec_", "Stripe webhook secret", 24, 64),
    sure("sk-ant-", "Anthropic API key", 32, 255),
    Token { is_sure: false, ..sure("sk-", "OpenAI API key", 20, 255) },
    sure("npm_", "npm token", 36, 36),
    sure("pypi-AgE", "PyPI token", 40, 512),
    Token { is_sure: false, ..sure("hf_", "Hugging Face token", 30, 60) },
    sure("dop_v1_", "DigitalOcean token", 64, 64),
    sure("dckr_pat_", "Docker token", 20, 64),
    sure("shpat_", "Shopify token", 32, 32),
    Token { is_letter: is_dotted, ..sure("SG.", "SendGrid API key", 60, 80) },
    sure("AGE-SECRET-KEY-", "age key", 50, 70),
    sure("hvs.", "Vault token", 24, 128),
];

/// Names that secrets are given to, in lower case, and what those are then.
pub const NAMES: [(&str, &str); 15] = [
    ("password", "password"),
    ("passwd", "password"),
    ("passphrase", "password"),
    ("pwd", "password"),
    ("secret", "secret"),
    ("token", "token"),
    ("credential", "secret"),
    ("api_key", "API key"),
    ("apikey", "API key"),
    ("api-key", "API key"),
    ("access_key", "access key"),
    ("accesskey", "access key"),
    ("private_key", "private key"),
    ("auth_key", "API key"),
    ("accountkey", "access key"),
];

/// How names end that hold something about a secret, not the secret.
pub const AFTER: &str = "type url uri name names field path file count _id len length size expiry \
    expires expires_in regex pattern label placeholder title message error hash digest checksum \
    sha256 sha1 index idx version";

/// What stands where a secret belongs, in lower case.
const PLACEHOLDERS: &str = "example your xxxx placeholder changeme change-me change_me changethis \
    dummy fake sample redacted replace insert todo test mock demo foobar deadbeef password passwd \
    secret token apikey api_key api-key mykey my-key my_key 123456 abcdef qwerty 000000 111111 \
    process.env hunter2 letmein admin default none null undefined unused invalid hello world \
    sha256- sha384- sha512- env. config. settings.";

/// Whether a value only stands for a secret.
pub fn is_placeholder(value: &[u8]) -> bool {
    let lower = value.to_ascii_lowercase();
    let has = |word: &str| lower.windows(word.len()).any(|part| part == word.as_bytes());
    let mut seen = [false; 256];
    lower.iter().for_each(|byte| seen[usize::from(*byte)] = true);
    let n_distinct = seen.iter().filter(|seen| **seen).count();
    let is_pattern =
        value.iter().any(|byte| b"<>{}[]()*$%# \\".contains(byte)) && value.len() >= 16;
    n_distinct < 4 || is_pattern || lower.starts_with(b"0x") || PLACEHOLDERS.split(' ').any(has)
}

/// Whether a value is no word and no row of words: it has letters and digits in short runs.
pub fn is_random(value: &[u8]) -> bool {
    #[derive(Clone, Copy, PartialEq)]
    enum Run {
        Upper,
        Lower,
        Digit,
        None,
    }
    let (mut n_runs, mut n_in_runs, mut n_digits) = (0, 0, 0);
    let mut last = Run::None;
    for byte in value {
        let run = match byte {
            b'A'..=b'Z' => Run::Upper,
            b'a'..=b'z' => Run::Lower,
            b'0'..=b'9' => Run::Digit,
            _ => Run::None,
        };
        n_digits += usize::from(run == Run::Digit);
        n_in_runs += usize::from(run != Run::None);
        // A capital letter begins the word that follows.
        let continues = run == last || (last == Run::Upper && run == Run::Lower);
        n_runs += usize::from(run != Run::None && !continues);
        last = run;
    }
    let n_letters = n_in_runs - n_digits;
    let is_short = |n_max: f64| n_in_runs as f64 <= n_max * n_runs as f64;
    let is_mixed = n_digits >= 2 && n_letters >= 2 && is_short(3.2);
    let is_unlikely = entropy(value) >= 3.0;
    is_unlikely && (is_mixed || (value.len() >= 20 && is_short(2.2) && n_letters >= 2))
}

/// Bits of a letter, by how often each occurs in the value.
fn entropy(value: &[u8]) -> f64 {
    let mut counts = [0usize; 256];
    value.iter().for_each(|byte| counts[usize::from(*byte)] += 1);
    let share = |n: &usize| *n as f64 / value.len() as f64;
    counts.iter().filter(|n| **n > 0).map(share).map(|p| -p * p.log2()).sum()
}

/// Whether a value is one that people choose as a password: of letters, digits and signs, one word.
pub fn is_password(value: &[u8]) -> bool {
    let has = |is_so: fn(&u8) -> bool| usize::from(value.iter().any(is_so));
    let n_kinds = has(u8::is_ascii_lowercase)
        + has(u8::is_ascii_uppercase)
        + has(u8::is_ascii_digit)
        + has(u8::is_ascii_punctuation);
    let is_word =
        value.iter().all(|byte| byte.is_ascii_graphic() && !b"/<>{}()[]\\".contains(byte));
    let is_call = value.iter().any(|byte| b".:".contains(byte)) && n_kinds < 4;
    let has_digit = has(u8::is_ascii_digit) == 1;
    (8..64).contains(&value.len()) && is_word && has_digit && n_kinds >= 3 && !is_call
}

/// Five groups of hexadecimal digits.
pub fn is_uuid(value: &[u8]) -> bool {
    let groups: Vec<&[u8]> = value.split(|byte| *byte == b'-').collect();
    let lengths: Vec<usize> = groups.iter().map(|group| group.len()).collect();
    lengths == [8, 4, 4, 4, 12] && groups.concat().iter().all(u8::is_ascii_hexdigit)
}

/// Domains of examples, and parts of names before the `@` that are nobody's.
const NO_DOMAINS: &str = "example test foo bar baz domain localhost acme yourdomain your-domain \
    mysite invalid mydomain company yourcompany email";
const NOBODIES: &str = "git noreply no-reply donotreply do-not-reply user username you your.name \
    name someone this super return break continue foo bar test example email hg svn postgres root \
    admin support info security";

/// Top-level domains that are no country's. In code `a@b.weight` is a product.
const GENERIC: &str = "com org net edu gov mil int info biz io dev app ai co me tech cloud xyz \
    online site email name pro systems software solutions company group team codes engineering \
    agency digital network studio world life today works science blog live";

/// Those of countries, as pairs of letters.
const COUNTRIES: &str = "acadaeafagaialamaoaqarasatauawaxazbabbbdbebfbgbhbibjbmbnbobrbsbtbwbybz\
    cacccdcfcgchcickclcmcncocrcucvcwcxcyczdedjdkdmdodzeceeegereseteufifjfkfmfofrgagdgegfggghgiglgm\
    gngpgqgrgsgtgugwgyhkhmhnhrhthuidieiliminioiqirisitjejmjojpkekgkhkikmknkpkrkwkykzlalblclilklrls\
    ltlulvlymamcmdmgmhmkmlmmmnmompmqmrmsmtmumvmwmxmymznancnenfngninlnonpnrnunzompapepfpgphpkplpmpn\
    prpsptpwpyqarerorsrurwsasbscsdsesgshsiskslsmsnsosrssstsvsxsysztctdtftgthtjtktltmtntotrtttvtwtz\
    uaugukusuyuzvavcvevgvivnvuwfwsyeytzazmzw";

/// Whether an address may be that of a person.
pub fn is_person(local: &str, domain: &str) -> bool {
    let (local, domain) = (local.to_ascii_lowercase(), domain.to_ascii_lowercase());
    let Some((names, last)) = domain.rsplit_once('.') else { return false };
    let is_in = |list: &str, word: &str| list.split(' ').any(|other| other == word);
    let pairs = || COUNTRIES.as_bytes().chunks_exact(2);
    let is_top =
        is_in(GENERIC, last) || pairs().any(|pair| pair.eq_ignore_ascii_case(last.as_bytes()));
    let site = names.rsplit('.').next().unwrap_or(names);
    let is_name = |name: &str| {
        let ends = [name.as_bytes().first(), name.as_bytes().last()];
        ends.into_iter().all(|end| end.is_some_and(u8::is_ascii_alphanumeric))
    };
    let is_nobody = is_in(NOBODIES, &local) || local.starts_with("noreply");
    let is_nowhere = is_in(NO_DOMAINS, site) || names.split('.').any(|name| name == "noreply");
    local.len() <= 64
        && is_top
        && domain.split('.').all(is_name)
        && is_name(&local)
        && !is_nobody
        && !is_nowhere
}
