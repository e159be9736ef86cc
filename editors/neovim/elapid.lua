-- Completions by `elapid lsp` in Neovim.
--
--   require("elapid").setup()
--
-- Where Neovim has inline completion (0.12), that is used. Where it has not, this file asks, and
-- shows the answer as virtual text: <C-l> asks, <Tab> accepts, any other key dismisses it.

local M = { client = nil, shown = nil }
local space = vim.api.nvim_create_namespace("elapid")
local options = {
  cmd = { "elapid", "lsp" },
  ask = "<C-l>",
  accept = "<Tab>",
}

local function root(buffer)
  local name = vim.api.nvim_buf_get_name(buffer)
  local folder = name ~= "" and vim.fn.fnamemodify(name, ":p:h") or vim.fn.getcwd()
  local mark = vim.fn.finddir(".elapid", folder .. ";")
  if mark == "" then
    mark = vim.fn.finddir(".git", folder .. ";")
  end
  return mark ~= "" and vim.fn.fnamemodify(mark, ":p:h:h") or folder
end

--- Removes what is shown.
function M.dismiss()
  if M.shown then
    vim.api.nvim_buf_clear_namespace(M.shown.buffer, space, 0, -1)
    M.shown = nil
  end
end

--- Shows a text at the cursor, its first line over what follows there.
local function show(buffer, text)
  M.dismiss()
  local row, column = unpack(vim.api.nvim_win_get_cursor(0))
  local lines = vim.split(text, "\n")
  local more = {}
  for n = 2, #lines do
    more[#more + 1] = { { lines[n], "Comment" } }
  end
  vim.api.nvim_buf_set_extmark(buffer, space, row - 1, column, {
    virt_text = { { lines[1], "Comment" } },
    virt_text_pos = "overlay",
    virt_lines = #more > 0 and more or nil,
  })
  M.shown = { buffer = buffer, row = row, column = column, lines = lines }
end

--- Asks for a completion at the cursor; an older request is cancelled.
function M.ask()
  local buffer = vim.api.nvim_get_current_buf()
  local client = M.client and vim.lsp.get_client_by_id(M.client)
  if not client then
    return
  end
  local row, column = unpack(vim.api.nvim_win_get_cursor(0))
  local line = vim.api.nvim_buf_get_lines(buffer, row - 1, row, true)[1]
  local is_utf8 = client.offset_encoding == "utf-8"
  local _, utf16 = vim.str_utfindex(line, column)
  local params = {
    textDocument = { uri = vim.uri_from_bufnr(buffer) },
    position = { line = row - 1, character = is_utf8 and column or utf16 },
    context = { triggerKind = 1 },
  }
  if M.request then
    client.cancel_request(M.request)
  end
  local function take(err, result)
    M.request = nil
    local place = vim.api.nvim_win_get_cursor(0)
    local item = not err and result and result.items[1]
    if item and place[1] == row and place[2] == column then
      show(buffer, item.insertText)
    end
  end
  local _, id = client.request("textDocument/inlineCompletion", params, take, buffer)
  M.request = id
end

--- Inserts what is shown; false where nothing is.
function M.accept()
  local shown = M.shown
  if not shown then
    return false
  end
  M.dismiss()
  local row, lines = shown.row - 1, shown.lines
  vim.api.nvim_buf_set_text(shown.buffer, row, shown.column, row, shown.column, lines)
  local start = #lines == 1 and shown.column or 0
  vim.api.nvim_win_set_cursor(0, { shown.row + #lines - 1, start + #lines[#lines] })
  return true
end

local function keys(key)
  return vim.api.nvim_replace_termcodes(key, true, false, true)
end

local function setup_own()
  vim.keymap.set("i", options.ask, M.ask, { desc = "elapid: ask for a completion" })
  vim.keymap.set("i", options.accept, function()
    if not M.accept() then
      vim.api.nvim_feedkeys(keys(options.accept), "n", false)
    end
  end, { desc = "elapid: accept a completion" })
  vim.api.nvim_create_autocmd({ "CursorMovedI", "InsertLeave", "TextChangedI" }, {
    callback = M.dismiss,
  })
end

local function setup_builtin()
  vim.lsp.inline_completion.enable(true)
  vim.keymap.set("i", options.accept, function()
    return vim.lsp.inline_completion.get() and "" or options.accept
  end, { expr = true, desc = "elapid: accept a completion" })
end

function M.attach(buffer)
  if vim.bo[buffer].buftype ~= "" then
    return
  end
  local folder = root(buffer)
  local config = { name = "elapid", cmd = options.cmd, root_dir = folder }
  config.workspace_folders = { { uri = vim.uri_from_fname(folder), name = folder } }
  if vim.lsp.start then
    M.client = vim.lsp.start(config, { bufnr = buffer })
  else
    -- Before 0.8.
    M.client = M.client or vim.lsp.start_client(config)
    vim.lsp.buf_attach_client(buffer, M.client)
  end
end

function M.setup(given)
  options = vim.tbl_extend("force", options, given or {})
  vim.api.nvim_create_autocmd("FileType", {
    callback = function(event)
      M.attach(event.buf)
    end,
  })
  if vim.lsp.inline_completion then
    setup_builtin()
  else
    setup_own()
  end
end

return M
