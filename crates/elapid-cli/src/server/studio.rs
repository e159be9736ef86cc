//! `/studio`: a page that learns a folder of code in the browser, as static files of one folder.
//!
//! `web/build-studio` makes the folder and writes the names of its files into `files.json`. Only
//! what stands there is served, by comparing names: no path is made of what a client sends. A file
//! is read when it is first asked for and shared by all answers from then on, because clients need
//! no key here and may be slow.
//!
//! Not here: what the page does (`web/studio`). It asks nothing of this server but these files.

use super::models::Models;
use crate::report::{Done, Failure};
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use axum::response::{Html, IntoResponse, Redirect, Response};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

const LIST: &str = "files.json";
const N_FILES_MAX: usize = 1000;
const FILE_BYTES_MAX: u64 = 256 << 20;

/// The same stands in the page, for other web servers.
const POLICY: &str = "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; \
                      style-src 'self'; img-src 'self'; connect-src 'self'; \
                      worker-src 'self' blob:; manifest-src 'self'; frame-ancestors 'none'; \
                      base-uri 'none'; form-action 'none'";

const MISSING: &str = "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\">\
    <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
    <meta name=\"color-scheme\" content=\"light dark\"><title>Elapid Studio</title>\
    <h1>Elapid Studio is not installed here</h1>\
    <p>It is a folder of static files: a page that learns your code in the browser. In a checkout \
    of Elapid run <code>web/build-studio</code>, then start the server again with \
    <code>elapid serve --studio DIR</code>, where DIR is the folder that it names.</p>\
    <p><a href=\"/\">Try the model of this server</a></p></html>";

/// The files of the page.
pub struct Studio {
    dir: PathBuf,
    files: BTreeMap<String, OnceLock<Option<File>>>,
}

struct File {
    bytes: Bytes,
    /// For `If-None-Match`: a hash of the bytes.
    tag: HeaderValue,
}

#[derive(serde::Deserialize)]
struct List {
    files: Vec<String>,
}

impl Studio {
    /// The folder that was given, or the one beside the binary if it is there.
    pub fn find(given: Option<&Path>) -> Done<Option<Studio>> {
        if let Some(dir) = given {
            return Studio::open(dir).map(Some);
        }
        let binary = std::env::current_exe().ok();
        let root = binary.as_deref().and_then(Path::parent).and_then(Path::parent);
        let dir = root.map(|root| root.join("share/elapid/studio"));
        match dir.filter(|dir| dir.join(LIST).is_file()) {
            Some(dir) => Studio::open(&dir).map(Some),
            None => Ok(None),
        }
    }

    fn open(dir: &Path) -> Done<Studio> {
        let fail = |problem: &dyn std::fmt::Display| {
            let problem = format!("{} is no folder of Elapid Studio: {problem}", dir.display());
            Failure::new(problem, "make one with `web/build-studio DIR`, or remove --studio")
        };
        let text = elapid::read_text(&dir.join(LIST)).map_err(|error| fail(&error))?;
        let list: List =
            serde_json::from_str(&text).map_err(|error| fail(&format_args!("{LIST}: {error}")))?;
        if list.files.len() > N_FILES_MAX {
            return Err(fail(&format_args!("{LIST} names {} files", list.files.len())));
        }
        if let Some(name) = list.files.iter().find(|name| !is_plain(name)) {
            return Err(fail(&format_args!("{LIST} names `{}`", name.escape_debug())));
        }
        let files = list.files.into_iter().map(|name| (name, OnceLock::new())).collect();
        Ok(Studio { dir: dir.into(), files })
    }

    /// A file of the list; `None` where it is not in it or cannot be read.
    fn file(&self, name: &str) -> Option<&File> {
        let (name, cell) = self.files.get_key_value(name)?;
        cell.get_or_init(|| {
            let path = self.dir.join(name);
            let facts = std::fs::metadata(&path).ok()?;
            let is_fit = facts.is_file() && facts.len() <= FILE_BYTES_MAX;
            let bytes = is_fit.then(|| std::fs::read(&path).ok())??;
            let tag = format!("\"{}\"", &blake3::hash(&bytes).to_hex()[..32]);
            Some(File { bytes: bytes.into(), tag: HeaderValue::from_str(&tag).ok()? })
        })
        .as_ref()
    }
}

/// Names below the folder, of letters that mean the same in a URL and in a path.
fn is_plain(name: &str) -> bool {
    let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let is_part = |part: &str| !part.is_empty() && !part.starts_with('.');
    name.split('/').all(|part| is_part(part) && part.bytes().all(is_letter))
}

/// By what follows the last dot.
fn media_type(name: &str) -> &'static str {
    match name.rsplit('.').next().unwrap_or_default() {
        "html" => "text/html; charset=utf-8",
        "js" => "text/javascript; charset=utf-8",
        "css" => "text/css; charset=utf-8",
        "json" => "application/json",
        "webmanifest" => "application/manifest+json",
        "svg" => "image/svg+xml",
        "png" => "image/png",
        "wasm" => "application/wasm",
        "ts" | "txt" | "md" => "text/plain; charset=utf-8",
        _ => "application/octet-stream",
    }
}

/// `/studio` and everything below it.
pub async fn answer(State(models): State<Arc<Models>>, uri: Uri, headers: HeaderMap) -> Response {
    let Some(studio) = &models.shared.settings.studio else {
        return (StatusCode::NOT_FOUND, policy(), Html(MISSING)).into_response();
    };
    // Names in the page are relative to its folder.
    let Some(name) = uri.path().strip_prefix("/studio/") else {
        return Redirect::permanent("/studio/").into_response();
    };
    let name = if name.is_empty() { "index.html" } else { name };
    let Some(file) = tokio::task::block_in_place(|| studio.file(name)) else {
        return super::not_found(axum::http::Method::GET, uri).await.into_response();
    };
    // A copy is kept, and asked about each time: a new version is seen at once.
    let caching = [
        (header::ETAG, file.tag.clone()),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    let known = headers.get(header::IF_NONE_MATCH).and_then(|value| value.to_str().ok());
    let tag = file.tag.to_str().unwrap_or_default();
    if known.is_some_and(|known| known.contains(tag)) {
        return (StatusCode::NOT_MODIFIED, caching).into_response();
    }
    let kind = [(header::CONTENT_TYPE, media_type(name))];
    (caching, kind, policy(), file.bytes.clone()).into_response()
}

fn policy() -> [(header::HeaderName, &'static str); 2] {
    [(header::CONTENT_SECURITY_POLICY, POLICY), (header::REFERRER_POLICY, "no-referrer")]
}
