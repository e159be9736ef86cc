//! What is found and what is not. Secrets are written with `~` inside, so that this file has none.

use super::{Secret, SecretKind, find, redact};

/// (text, kind, what is replaced), with `~` for nothing.
const FOUND: [(&str, &str, &str); 41] = [
    ("id = AKIA~4QZT7BNVW2LKXM5P\n", "AWS access key", "AKIA~4QZT7BNVW2LKXM5P"),
    ("(ASIA~X2PQ7RTVN4LM8KWZ)", "AWS access key", "ASIA~X2PQ7RTVN4LM8KWZ"),
    (
        "aws_secret_access_key = q8Vt/2Lm+Zx0Rk5YbN7cJw3HdPf9SgU1aE6oKi4T\n",
        "access key",
        "q8Vt/2Lm+Zx0Rk5YbN7cJw3HdPf9SgU1aE6oKi4T",
    ),
    (
        "git clone https://x:gh~p_k2R9vLq8ZtXw4Bn7YcJ3mHd5PfSgUaEoKi6T@h/r\n",
        "GitHub token",
        "gh~p_k2R9vLq8ZtXw4Bn7YcJ3mHd5PfSgUaEoKi6T",
    ),
    (
        "GITHUB_TOKEN=gh~s_k2R9vLq8ZtXw4Bn7YcJ3mHd5PfSgUaEoKi6T\n",
        "GitHub token",
        "gh~s_k2R9vLq8ZtXw4Bn7YcJ3mHd5PfSgUaEoKi6T",
    ),
    (
        "'github~_pat_11ABQ7K2Y0vLq8ZtXw4Bn_7YcJ3mHd5PfSgUaEoKi6TrQ2'",
        "GitHub token",
        "github~_pat_11ABQ7K2Y0vLq8ZtXw4Bn_7YcJ3mHd5PfSgUaEoKi6TrQ2",
    ),
    ("PRIVATE-TOKEN: gl~pat-Zk4_vRq9xT2-LmWb7nYc", "GitLab token", "gl~pat-Zk4_vRq9xT2-LmWb7nYc"),
    (
        "slack('xo~xb-204816321-408163264-kV9zRq2LxT7wBn4YcJ3m')",
        "Slack token",
        "xo~xb-204816321-408163264-kV9zRq2LxT7wBn4YcJ3m",
    ),
    (
        "url: https://hooks.~slack.com/services/T04KZ7RQ2/B05XW9LMN/k2R9vLq8ZtXw4Bn7YcJ3mHd5\n",
        "Slack webhook",
        "hooks.~slack.com/services/T04KZ7RQ2/B05XW9LMN/k2R9vLq8ZtXw4Bn7YcJ3mHd5",
    ),
    (
        "key=AI~zaSyD4k2R9vLq8ZtXw_Bn7YcJ3mHd5PfSgUaE\"",
        "Google API key",
        "AI~zaSyD4k2R9vLq8ZtXw_Bn7YcJ3mHd5PfSgUaE",
    ),
    (
        "\"client\": \"GOC~SPX-k2R9vLq8ZtXw4Bn7YcJ3mHd5PfSg\"",
        "Google client secret",
        "GOC~SPX-k2R9vLq8ZtXw4Bn7YcJ3mHd5PfSg",
    ),
    (
        "stripe.api_key = \"sk~_live_k2R9vLq8ZtXw4Bn7YcJ3mHd5\"",
        "Stripe key",
        "sk~_live_k2R9vLq8ZtXw4Bn7YcJ3mHd5",
    ),
    ("sk~_test_4eC39HqLyjWDarjtT1zdp7dc", "Stripe key", "sk~_test_4eC39HqLyjWDarjtT1zdp7dc"),
    (
        "whsec = 'whs~ec_k2R9vLq8ZtXw4Bn7YcJ3mHd5PfSg'",
        "Stripe webhook secret",
        "whs~ec_k2R9vLq8ZtXw4Bn7YcJ3mHd5PfSg",
    ),
    (
        "OPENAI: sk~-proj-k2R9vLq8ZtXw4Bn7YcJ3mHd5PfSgUaEo\n",
        "OpenAI API key",
        "sk~-proj-k2R9vLq8ZtXw4Bn7YcJ3mHd5PfSgUaEo",
    ),
    (
        "sk~-ant-api03-k2R9vLq8ZtXw4Bn7YcJ3mHd5PfSgUaEo-AA",
        "Anthropic API key",
        "sk~-ant-api03-k2R9vLq8ZtXw4Bn7YcJ3mHd5PfSgUaEo-AA",
    ),
    (
        "//r/:_authToken=np~m_k2R9vLq8ZtXw4Bn7YcJ3mHd5PfSgUaEoKi6T\n",
        "npm token",
        "np~m_k2R9vLq8ZtXw4Bn7YcJ3mHd5PfSgUaEoKi6T",
    ),
    (
        "password = py~pi-AgEIcHlwaS5vcmcCJDk2R9vLq8ZtXw4Bn7YcJ3mHd5PfSgUaEoKi6T\n",
        "PyPI token",
        "py~pi-AgEIcHlwaS5vcmcCJDk2R9vLq8ZtXw4Bn7YcJ3mHd5PfSgUaEoKi6T",
    ),
    (
        "jwt: ey~JhbGciOiJIUzI1NiJ9.ey~JzdWIiOiI0MiIsIm4iOjF9.k2R9vLq8ZtXw4Bn7YcJ3mHd5PfSgUaE",
        "JSON Web Token",
        "ey~JhbGciOiJIUzI1NiJ9.ey~JzdWIiOiI0MiIsIm4iOjF9.k2R9vLq8ZtXw4Bn7YcJ3mHd5PfSgUaE",
    ),
    ("postgres://app:vK9~zRq2Lx@db.internal:5432/x", "password in a URL", "vK9~zRq2Lx"),
    ("redis://:R9v~Lq8ZtXw4B@cache/0", "password in a URL", "R9v~Lq8ZtXw4B"),
    ("password = \"Tr0ub~4dor&3!\"", "password", "Tr0ub~4dor&3!"),
    ("db.set_password('9fK~!2mQz#7')", "password", "9fK~!2mQz#7"),
    ("  \"dbPassword\": \"kV9~zRq2L!xT\",", "password", "kV9~zRq2L!xT"),
    (
        "const API_KEY: &str = \"9f8e7d6c5b4a~39281706f5e4d3c2b1a0\";",
        "API key",
        "9f8e7d6c5b4a~39281706f5e4d3c2b1a0",
    ),
    ("apiKey: 'k2R9vLq8~ZtXw4Bn7'", "API key", "k2R9vLq8~ZtXw4Bn7"),
    ("export AUTH_TOKEN=k2r9vlq8ztxw~4bn7ycj3\n", "token", "k2r9vlq8ztxw~4bn7ycj3"),
    (
        "secret: 0f9a8b7c6d5e4f3a~2b1c0d9e8f7a6b5c # rotate",
        "secret",
        "0f9a8b7c6d5e4f3a~2b1c0d9e8f7a6b5c",
    ),
    ("os.environ[\"API_TOKEN\"] = \"Zk4vRq9xT2~LmWb7nYc\"", "token", "Zk4vRq9xT2~LmWb7nYc"),
    ("setenv('SECRET_KEY', 'Zk4vRq9xT2~LmWb7nYc')", "secret", "Zk4vRq9xT2~LmWb7nYc"),
    ("token := \"Zk4vRq9xT2~LmWb7nYc\"", "token", "Zk4vRq9xT2~LmWb7nYc"),
    (":secret => 'Zk4vRq9xT2~LmWb7nYc'", "secret", "Zk4vRq9xT2~LmWb7nYc"),
    ("let s = \"{\\\"token\\\": \\\"Zk4vRq9xT2~LmWb7nYc\\\"}\";", "token", "Zk4vRq9xT2~LmWb7nYc"),
    ("Authorization: Bearer Zk4vRq9xT2~LmWb7nYcPd8", "token", "Zk4vRq9xT2~LmWb7nYcPd8"),
    (
        "AccountKey=q8Vt2LmZx0Rk5YbN~7cJw3HdPf9SgU1aE==;",
        "access key",
        "q8Vt2LmZx0Rk5YbN~7cJw3HdPf9SgU1aE==",
    ),
    ("client_secret: kJhGfDsAqZe~RtYuIoPzXcVb", "secret", "kJhGfDsAqZe~RtYuIoPzXcVb"),
    ("// Written by <first.last~@somewhere.de>.", "e-mail address", "first.last~@somewhere.de"),
    ("mailto:f.last+lists~@some-where.edu.", "e-mail address", "f.last+lists~@some-where.edu"),
    ("author = 'writer~@somewhere.io'", "e-mail address", "writer~@somewhere.io"),
    ("Grüße für reader~@somewhere.co.uk!", "e-mail address", "reader~@somewhere.co.uk"),
    (
        "SG~.k2R9vLq8ZtXw4Bn7YcJ3mH.d5PfSgUaEoKi6Tk2R9vLq8ZtXw4Bn7YcJ3mHd5PfSgUaEo",
        "SendGrid API key",
        "SG~.k2R9vLq8ZtXw4Bn7YcJ3mH.d5PfSgUaEoKi6Tk2R9vLq8ZtXw4Bn7YcJ3mHd5PfSgUaEo",
    ),
];

/// Nothing to find in any of these.
const NOT_FOUND: [&str; 60] = [
    "AKIAIOSFODNN7EXAMPLE",
    "id = BAKIA4QZT7BNVW2LKXM5P",
    "AKIA4QZT7BNVW2LKXM5PQR",
    "gh~p_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
    "let ghp_count = 3; ghp_total += ghp_count;",
    "api_key = \"your-api-key-here\"",
    "api_key: <your key here, 32 letters>",
    "API_KEY=${API_KEY}",
    "apiKey: process.env.API_KEY,",
    "token = \"{{ secrets.DEPLOY_TOKEN }}\"",
    "password = \"changeme\"",
    "password = \"password123!\"",
    "PASSWORD=example-password-1234567890",
    "let password = read_password(&mut stdin)?;",
    "if password == other.password { return Ok(()) }",
    "password: String,",
    "\"password\": \"Passwort vergessen?\",",
    "<input type=\"password\" name=\"password\" id=\"login-password-2\">",
    "token_type = \"urn:ietf:params:oauth:token-type:jwt\"",
    "tokenizer = \"Zk4vRq9xT2LmWb7nYc\"",
    "let token = tokens[index + 1];",
    "token: tokenizer.next_token_after_position_12,",
    "token = some_long_variable_name_with_2_numbers",
    "secretName: registry-credentials-production-2",
    "secret_id = \"0f9a8b7c6d5e4f3a2b1c0d9e8f7a6b5c\"",
    "token = \"550e8400-e29b-41d4-a716-446655440000\"",
    "id = \"550e8400-e29b-41d4-a716-446655440000\"",
    "checksum = \"0f9a8b7c6d5e4f3a2b1c0d9e8f7a6b5c0f9a8b7c6d5e4f3a2b1c0d9e8f7a6b5c\"",
    "\"integrity\": \"sha512-q8Vt2LmZx0Rk5YbN7cJw3HdPf9SgU1aEq8Vt2LmZx0Rk5YbN7cJw3HdPf9SgU1aE==\"",
    "commit 0f9a8b7c6d5e4f3a2b1c0d9e8f7a6b5c0f9a8b7c",
    "password_hash = \"0f9a8b7c6d5e4f3a2b1c0d9e8f7a6b5c\"",
    "secret = \"xxxxxxxxxxxxxxxxxxxxxxxx\"",
    "secret = \"********************\"",
    "token = \"test-token-for-unit-tests-42\"",
    "token = \"1234567890abcdef1234567890abcdef\"",
    "TOKEN = 0xdeadbeefcafe1234567890",
    "const TOKEN_COUNT: usize = 16384;",
    "MAX_TOKENS = 1_000_000_000_000_000",
    "token_url: https://id.internal/oauth2/v2.0/token",
    "apiKeyHeader: 'X-Custom-Api-Key-Header-V2'",
    "eyJhbGciOiJIUzI1NiJ9 is the header of a JWT",
    "sk-folding-cube-animation-wrapper",
    ".sk-circle-fade-dot-1:before { width: 100% }",
    "https://host:8080/path@2x",
    "http://user:password@localhost:5432/db",
    "postgres://postgres:postgres@localhost/app",
    "amqp://${USER}:${PASS}@host",
    "ftp://[user[:password]@]host",
    "user@example.com, a@b.example.org",
    "git@github.com:owner/name.git",
    "noreply@github.com and 12+x@users.noreply.github.com",
    "y = x@w.weight + b@self.proj.T",
    "@app.route('/') and @media.screen",
    "react@17.0.2 left-pad@1.3.0",
    "logo@2x.png getty@tty1.service",
    "this@MainActivity.finish()",
    "-----BEGIN PUBLIC KEY-----\nMIIBIjANBgkqhkiG9w0BAQEFAAOCAQ8AMIIBCgKCAQEA0Z3VS5JJcds3xfn\n",
    "A key begins with `-----BEGIN RSA PRIVATE KEY-----`.",
    "Bearer of bad news, as they say in the office",
    "fn sign(secret: &[u8], message: &[u8]) -> [u8; 32] {",
];

fn plain(text: &str) -> String {
    text.replace('~', "")
}

#[test]
fn secrets_are_found_where_they_are_and_told_by_kind() {
    for (text, kind, value) in FOUND {
        let told = vec![(kind, plain(value))];
        assert_eq!(told_of(&plain(text)), told, "{text}");
    }
}

fn told_of(text: &str) -> Vec<(&'static str, String)> {
    let one = |it: Secret| (it.kind.describe(), text[it.range].to_string());
    find(text).into_iter().map(one).collect()
}

#[test]
fn what_only_looks_like_a_secret_is_left_alone() {
    for text in NOT_FOUND {
        assert_eq!(told_of(&plain(text)), [], "{text}");
    }
}

#[test]
fn a_private_key_is_replaced_up_to_its_end_and_lines_keep_their_numbers() {
    let begin = ["-----BEGIN RSA", " PRIVATE KEY-----"].concat();
    let code = "MIIEpAIBAAKCAQEA0Z3VS5JJcds3xfnqB/+Lm2YcJ3mHd5PfSgUaEoKi6TkR9vLq\n".repeat(3);
    let text =
        format!("first\nkey = \"\"\"{begin}\n{code}-----END RSA PRIVATE KEY-----\"\"\"\nlast");
    let (clean, found) = redact(&text);
    assert_eq!(clean, "first\nkey = \"\"\"<secret>\n\n\n\n\"\"\"\nlast");
    assert_eq!((found.len(), found[0].kind), (1, SecretKind::PrivateKey));
    assert_eq!((found[0].line, found[0].column), (2, 10));
    // Spelled out in a string, and cut off.
    let code = code.replace('\n', "\\n");
    let spelled = format!("k = '{begin}\\n{code}-----END RSA PRIVATE KEY-----\\n';\n");
    assert_eq!(redact(&spelled).0, "k = '<secret>\\n';\n");
    assert_eq!(redact(&format!("{begin}\n{code}")).0, "<secret>\n");
}

#[test]
fn lines_and_columns_count_characters_from_one() {
    let text = plain("é = 1\n\n  ü, 'reader~@somewhere.de'\ntoken='Zk4vRq9xT2~LmWb7nYc'\n");
    let (clean, found) = redact(&text);
    let places: Vec<_> = found.iter().map(|it| (it.line, it.column)).collect();
    assert_eq!(places, [(3, 7), (4, 8)]);
    assert_eq!(clean, "é = 1\n\n  ü, 'user@example.com'\ntoken='<secret>'\n");
    assert_eq!(clean.lines().count(), text.lines().count());
}

#[test]
fn a_clean_text_is_clean_and_costs_no_copy() {
    let all: String = FOUND.iter().map(|(text, ..)| plain(text) + "\n").collect();
    let (clean, found) = redact(&all);
    assert_eq!(found.len(), FOUND.len());
    for (_, _, value) in FOUND {
        assert!(!clean.contains(&plain(value)), "{value}");
    }
    let (again, found) = redact(&clean);
    assert_eq!((again.as_ref(), found), (clean.as_ref(), Vec::new()));
    assert!(matches!(again, std::borrow::Cow::Borrowed(_)));
}

#[test]
fn any_cut_of_any_text_is_read_without_a_panic() {
    let all: String = FOUND.iter().map(|(text, ..)| plain(text) + "ß€").collect();
    let begin = ["-----BEGIN", " PRIVATE KEY-----"].concat();
    for (at, _) in all.char_indices().step_by(3) {
        redact(&all[at..]);
        redact(&all[..at]);
        let text = format!("{begin}{}-----END ßß{}", &all[..at.min(90)], &all[at..]);
        redact(text.get(..text.len() - 1).unwrap_or(&text));
    }
}
