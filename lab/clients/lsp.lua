-- Neovim as a client of `elapid lsp`: opens a file, asks for an inline completion, cancels another.
-- nvim -u NONE -c 'luafile lsp.lua'; ELAPID, FILE and OUT are in the environment.
local function done(words)
  local file = io.open(os.getenv('OUT'), 'w')
  file:write(words .. '\n')
  file:close()
  vim.cmd('qall!')
end
vim.cmd('edit ' .. os.getenv('FILE'))
local id = vim.lsp.start_client({
  name = 'elapid', cmd = { os.getenv('ELAPID'), 'lsp' }, root_dir = vim.fn.getcwd(),
  on_attach = function(client)
    local params = {
      textDocument = { uri = vim.uri_from_bufnr(0) },
      position = { line = 1, character = 4 }, context = { triggerKind = 1 },
    }
    local method = 'textDocument/inlineCompletion'
    local _, request = client.request(method, params, function() end, 0)
    client.cancel_request(request)
    client.request(method, params, function(error, result)
      local items = result and (result.items or result) or {}
      if error or #items == 0 then return done('failed: ' .. vim.inspect(error or result)) end
      vim.api.nvim_buf_set_text(0, 1, 4, 1, 4, vim.split(items[1].insertText, '\n'))
      vim.cmd('write')
      done('inserted: ' .. items[1].insertText)
    end, 0)
  end,
})
if not id then return done('failed: elapid lsp does not start') end
vim.lsp.buf_attach_client(0, id)
