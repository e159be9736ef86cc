//! Requests to the hub: the only code of the project that opens an outgoing connection.
//!
//! The endpoint is `HF_ENDPOINT`, the token `HF_TOKEN` or what `hf auth login` wrote. It goes to
//! the endpoint alone, never to a host that this redirects to. Proxies are those of `ALL_PROXY`,
//! `HTTPS_PROXY`, `HTTP_PROXY` and `NO_PROXY`; `SSL_CERT_FILE` names certificates to trust instead
//! of the built-in ones.

use super::cache::{home, variable};
use super::{Name, is_inside};
use crate::files;
use crate::report::{Done, Failure};
use serde_json::Value;
use std::io::Read;
use std::time::Duration;
use ureq::http::{Response, Uri};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body};

const ENDPOINT: &str = "https://huggingface.co";
const N_REDIRECTS_MAX: usize = 10;
/// Attempts in a row that bring nothing.
const N_TRIES: u32 = 6;
/// A server that wants more patience is not waited for.
const WAIT_MAX: Duration = Duration::from_secs(300);

/// Why a request failed.
pub enum Trouble {
    Final(Failure),
    /// May work later; the server may say when.
    Again(String, Option<Duration>),
}

impl From<Failure> for Trouble {
    fn from(failure: Failure) -> Trouble {
        Trouble::Final(failure)
    }
}

/// What the hub says of a file.
pub struct Facts {
    /// Names its contents: SHA-256, or the hash of git's blob for a small file.
    pub etag: String,
    pub n_bytes: u64,
}

pub struct Client<'a> {
    agent: Agent,
    /// Without a slash at its end.
    endpoint: String,
    token: Option<String>,
    /// Before the second attempt; doubled before each one that follows.
    wait: Duration,
    /// Told of every failed attempt.
    note: &'a dyn Fn(&str),
}

impl Client<'_> {
    pub fn new(note: &dyn Fn(&str)) -> Done<Client<'_>> {
        let text =
            |name: &str| variable(name).and_then(|value| value.into_os_string().into_string().ok());
        let file = variable("HF_TOKEN_PATH").or_else(|| Some(home()?.join("token")));
        let token = text("HF_TOKEN").or_else(|| files::read_text(&file?).ok());
        let token = token.map(|token| token.trim().to_string()).filter(|token| !token.is_empty());
        let endpoint = text("HF_ENDPOINT").unwrap_or(ENDPOINT.into());
        let wait_ms = text("ELAPID_PULL_WAIT_MS").and_then(|ms| ms.parse().ok()).unwrap_or(1000);
        let seconds = |n: u64| Some(Duration::from_secs(n));
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_connect(seconds(30))
            .timeout_recv_response(seconds(60))
            .timeout_per_read(seconds(60))
            .user_agent(concat!("elapid/", env!("CARGO_PKG_VERSION")))
            .accept_encoding("identity")
            .tls_config(TlsConfig::builder().root_certs(certificates()?).build());
        Ok(Client {
            agent: config.build().new_agent(),
            endpoint: endpoint.trim_end_matches('/').into(),
            token,
            wait: Duration::from_millis(wait_ms),
            note,
        })
    }

    /// The commit of a revision, and the names of all files.
    pub fn files(&self, name: &Name) -> Done<(String, Vec<String>)> {
        let revision = encoded(name.revision()).replace('/', "%2F");
        let path = format!("/api/models/{}/revision/{revision}", name.repo);
        let ask = &mut || {
            let mut response = self.send(Method::Get, &path, 0, name)?.0;
            let text = response.body_mut().with_config().limit(64 << 20).read_to_string();
            text.map_err(|error| self.trouble(error))
        };
        let text = self.patiently(ask)?;
        let answer: Option<Value> = serde_json::from_str(&text).ok();
        let found = answer.as_ref().and_then(|answer| {
            let names = answer["siblings"].as_array()?.iter();
            let names = names.map(|file| file["rfilename"].as_str().map(str::to_string));
            let names = names.collect::<Option<Vec<String>>>()?;
            let commit =
                answer["sha"].as_str().filter(|it| super::is_hex(it, super::cache::N_COMMIT))?;
            names.iter().all(|name| is_inside(name)).then(|| (commit.to_string(), names))
        });
        found.ok_or_else(|| self.strange("no list of files"))
    }

    /// What a file at a commit is, without its contents.
    pub fn facts(&self, name: &Name, at: [&str; 2]) -> Done<Facts> {
        let path = self.place(name, at);
        let (last, hops) = self.patiently(&mut || self.send(Method::Head, &path, 0, name))?;
        let of = |key: &str| hops.iter().chain([&last]).find_map(|hop| header(hop, key));
        let own = |key: &str| header(&last, key).filter(|_| last.status().is_success());
        if of("x-repo-commit").is_some_and(|commit| commit != at[0]) {
            return Err(self.strange("a file of another commit"));
        }
        let etag = of("x-linked-etag").or_else(|| own("etag"));
        let etag = etag.map(|tag| tag.trim_start_matches("W/").trim_matches('"').to_string());
        let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
        let etag = etag.filter(|tag| !tag.is_empty() && tag.chars().all(is_plain));
        let n_bytes = of("x-linked-size").or_else(|| own("content-length"));
        let n_bytes = n_bytes.and_then(|text| text.parse().ok());
        let facts = etag.zip(n_bytes).map(|(etag, n_bytes)| Facts { etag, n_bytes });
        facts.ok_or_else(|| self.strange(&format!("neither hash nor size of {}", at[1])))
    }

    /// The contents of a file from this byte on, or where the server does not know ranges from the
    /// first; tells which.
    pub fn contents(
        &self,
        name: &Name,
        at: [&str; 2],
        first: u64,
    ) -> Result<(u64, impl Read + use<>), Trouble> {
        let response = self.send(Method::Get, &self.place(name, at), first, name)?.0;
        let begins = match response.status().as_u16() {
            206 => header(&response, "content-range").and_then(|range| {
                range.strip_prefix("bytes ")?.split_once('-')?.0.parse::<u64>().ok()
            }),
            _ => Some(0),
        };
        match begins.filter(|begin| *begin == first || *begin == 0) {
            Some(begin) => Ok((begin, response.into_body().into_reader())),
            None => Err(self.strange("another range than was asked for").into()),
        }
    }

    fn place(&self, name: &Name, [commit, file]: [&str; 2]) -> String {
        format!("/{}/resolve/{commit}/{}", name.repo, encoded(file))
    }

    /// Tries until it works or cannot, and waits before each new attempt.
    pub fn patiently<T>(&self, work: &mut dyn FnMut() -> Result<T, Trouble>) -> Done<T> {
        let mut n_tries = 0;
        loop {
            let (problem, asked) = match work() {
                Ok(done) => return Ok(done),
                Err(Trouble::Final(failure)) => return Err(failure),
                Err(Trouble::Again(problem, asked)) => (problem, asked),
            };
            n_tries += 1;
            let wait = asked.unwrap_or(self.wait * 2u32.pow(n_tries - 1));
            if n_tries == N_TRIES || wait > WAIT_MAX {
                let hint = "check the network and the proxy, then run the same command: it resumes";
                return Err(Failure::new(problem, hint));
            }
            (self.note)(&format!("{problem}; trying again in {:.1} s", wait.as_secs_f64()));
            std::thread::sleep(wait);
        }
    }

    /// Sends a request and follows redirects: all of them for contents, and only those on the
    /// endpoint for facts, which the endpoint alone tells. Returns the redirects too.
    fn send(&self, method: Method, path: &str, first: u64, name: &Name) -> Result<Hops, Trouble> {
        let mut url = format!("{}{path}", self.endpoint);
        let mut hops = Vec::new();
        while hops.len() <= N_REDIRECTS_MAX {
            let is_own = origin(&url).is_some() && origin(&url) == origin(&self.endpoint);
            let mut request = match method {
                Method::Get => self.agent.get(&url),
                Method::Head => self.agent.head(&url),
            };
            if let Some(token) = self.token.as_ref().filter(|_| is_own) {
                request = request.header("authorization", format!("Bearer {token}"));
            }
            if first > 0 {
                request = request.header("range", format!("bytes={first}-"));
            }
            let response = request.call().map_err(|error| self.trouble(error))?;
            let status = response.status();
            let Some(to) = header(&response, "location").filter(|_| status.is_redirection()) else {
                return match status.is_success() {
                    true => Ok((response, hops)),
                    false => Err(self.refused(&response, name)),
                };
            };
            let next = match (to.contains("://"), origin(&url)) {
                (false, Some(origin)) if to.starts_with('/') => format!("{origin}{to}"),
                _ => to.to_string(),
            };
            if matches!(method, Method::Head) && origin(&next) != origin(&self.endpoint) {
                return Ok((response, hops));
            }
            (url, hops) = (next, hops.into_iter().chain([response]).collect());
        }
        Err(self.strange("redirects without end").into())
    }

    /// A connection that failed.
    fn trouble(&self, error: ureq::Error) -> Trouble {
        let (problem, endpoint) = (error.to_string(), &self.endpoint);
        if problem.contains("ertificate") {
            let hint = "a proxy that reads along has a certificate of its own: name its file in \
                SSL_CERT_FILE";
            return Failure::new(format!("{endpoint}: {problem}"), hint).into();
        }
        match error {
            ureq::Error::BadUri(_) | ureq::Error::Http(_) | ureq::Error::InvalidProxyUrl => {
                let hint = "check HF_ENDPOINT and the variables of the proxy";
                Failure::new(format!("{endpoint}: {problem}"), hint).into()
            }
            _ => Trouble::Again(format!("{endpoint}: {problem}"), None),
        }
    }

    /// An answer that is an error.
    fn refused(&self, response: &Response<Body>, name: &Name) -> Trouble {
        let (status, endpoint) = (response.status().as_u16(), &self.endpoint);
        let repo = &name.repo;
        let told = header(response, "x-error-message").map(|text| format!(": {text}"));
        let told = told.unwrap_or_default();
        let page = format!("{endpoint}/{repo}");
        let (problem, hint) = match (status, header(response, "x-error-code")) {
            (408 | 429 | 500.., _) => {
                let seconds = header(response, "retry-after").and_then(|text| text.parse().ok());
                let problem = format!("{endpoint} answers {status}{told}");
                return Trouble::Again(problem, seconds.map(Duration::from_secs));
            }
            (401, _) if self.token.is_none() => (
                format!("{endpoint} wants a token for {repo}: it is private, gated or not there"),
                format!(
                    "check the name; if it is right, accept its terms at {page} and set HF_TOKEN"
                ),
            ),
            (401, _) => (
                format!("{endpoint} does not accept the token for {repo}{told}"),
                "check the name, and the token in HF_TOKEN or of `hf auth login`".into(),
            ),
            (403, _) => (
                format!("{endpoint} gives no access to {repo}{told}"),
                format!("ask for access at {page} with the account of the token"),
            ),
            (404, Some("RevisionNotFound")) => (
                format!("{repo} has no revision {}", name.revision()),
                format!("branches, tags and commits are listed at {page}"),
            ),
            (404, _) => (
                format!("{endpoint} has no {name}"),
                "check owner, repository and file; a private one needs a token in HF_TOKEN".into(),
            ),
            _ => (format!("{endpoint} answers {status}{told}"), "check HF_ENDPOINT".into()),
        };
        Failure::new(problem, &hint).into()
    }

    pub fn strange(&self, what: &str) -> Failure {
        let problem = format!("{} answers not as the hub does: {what}", self.endpoint);
        Failure::new(problem, "check HF_ENDPOINT and the proxy")
    }
}

#[derive(Clone, Copy)]
enum Method {
    Get,
    Head,
}

/// The last response, and the redirects before it.
type Hops = (Response<Body>, Vec<Response<Body>>);

fn header<'a>(response: &'a Response<Body>, key: &str) -> Option<&'a str> {
    response.headers().get(key)?.to_str().ok()
}

/// Scheme, host and port.
fn origin(url: &str) -> Option<String> {
    let uri: Uri = url.parse().ok()?;
    Some(format!("{}://{}", uri.scheme_str()?, uri.authority()?))
}

/// A path in a URL.
fn encoded(path: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    let of = |byte: u8| match is_plain(byte) {
        true => char::from(byte).to_string(),
        false => format!("%{byte:02X}"),
    };
    path.bytes().map(of).collect()
}

/// Whom to trust: the roots of Mozilla, or those in a file that the environment names.
fn certificates() -> Done<RootCerts> {
    let names = ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"];
    let Some(path) = names.into_iter().find_map(variable) else { return Ok(RootCerts::WebPki) };
    let text = files::read_text(&path)?;
    let list = parse_pem(text.as_bytes()).filter_map(|item| match item {
        Ok(PemItem::Certificate(certificate)) => Some(certificate),
        _ => None,
    });
    Ok(RootCerts::new_with_certs(&list.collect::<Vec<_>>()))
}
